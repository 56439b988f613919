"""On-policy distillation: the formula, a teacher equal to the student, both kinds of teacher, the log."""

import dataclasses
import json
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.chain_models import write_chain
from helpers.fixture_types import MakeRun
from helpers.kinds import FAMILIES, write_foreign
from helpers.policies import build_policy, initial_model
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from areal_q.algorithms import LossInputs
from areal_q.algorithms.kl import taught
from areal_q.checks.memory import learner_memory
from areal_q.checks.model import check_model, longest_prompt
from areal_q.checks.pass_memory import Lengths
from areal_q.cli.quantize import quantize
from areal_q.config import ModelTeacher, Run, ServerTeacher
from areal_q.errors import (
    CheckpointError,
    ConfigError,
    RecordError,
    SettingsError,
    Stopped,
    TeacherUnavailable,
)
from areal_q.messages import Array, Group, VersionSpan
from areal_q.models import Decoder, PackedLayout, load_config, save_decoder
from areal_q.models.hf.quantized import QUANTIZATION_CONFIGS
from areal_q.models.shape import shape_of
from areal_q.quant import dequantize_state, quantize_state
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.system.run_dir import claimed, resumed
from areal_q.tasks import CharTokenizer
from bench.records import make_group, make_ticket, make_trajectory
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table
from buffer.sampling.replay_pool import SampledGroups
from learner.build import build_learner
from learner.data.packing import Sample, pack_samples
from learner.data.staleness import VersionHistory
from learner.loop import Learner
from learner.policy_update import SingleProcessUpdater
from learner.teacher.build_teacher import build_teacher
from learner.teacher.model_beside import ModelBeside
from learner.teacher.scoring import with_logprobs
from learner.teacher.server import Server
from learner.train_step import train_step

TEACHER = "learner.teacher={type='model', path='none'}"
LENGTH = 5


def drawn(run: Run, model: Decoder, groups: int, seed: int = 0, reward: float = 0.0) -> list[Group]:
    """Returns groups of responses that `model` draws, with its own log-probs and equal rewards."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, 20, (groups, 4), generator=generator)
    ids = ids.repeat_interleave(run.learner.group_size, 0)
    logprobs = torch.zeros(len(ids), 0)
    with torch.no_grad():
        for _ in range(LENGTH):
            layout = PackedLayout.of([ids.shape[1]] * len(ids))
            hidden = model(ids.flatten(), layout).view(*ids.shape, -1)[:, -1]
            logp = model.logits(hidden).log_softmax(-1)
            token = logp.exp().multinomial(1, generator=generator)
            logprobs = torch.cat([logprobs, logp.gather(1, token)], 1)
            ids = torch.cat([ids, token], 1)
    size = run.learner.group_size
    spans = [VersionSpan(0, LENGTH, "d0")]

    def group(n: int) -> Group:
        rows = range(n * size, n * size + size)
        answers = [
            make_trajectory(
                i, ids[row, 4:], logprobs[row], spans=spans, reward=reward, finish_reason="length"
            )
            for i, row in enumerate(rows)
        ]
        prompt = Array.of(ids[n * size, :4], "int32")
        ticket = make_ticket(n, group_size=size, prompt_ids=prompt, sampling=run.rollout.sampling)
        return make_group(ticket, engine="torch", weight_format="bf16", trajectories=answers)

    return [group(n) for n in range(groups)]


def learnt(run: Run, policy, groups: list[Group]) -> dict[str, float]:
    return train_step(
        SingleProcessUpdater(policy), SampledGroups(groups), VersionHistory(4, {0: "d0"}), 0
    )


def test_advantages_are_those_of_the_table():
    x = torch.tensor([-1.0, -2.0, -3.0, -1.0, -0.5])
    inputs = LossInputs(
        logprobs=x - 1,
        proximal_logprobs=x,
        behavior_logprobs=x - 2,
        advantages=torch.tensor([0.5, 0.5, -1.0, -1.0, -1.0]),
        mask=torch.tensor([True, True, True, False, True]),
        sequence_ids=torch.tensor([0, 0, 1, 1, 1]),
        num_sequences=2,
        version_lag=torch.zeros(5, dtype=torch.int64),
        teacher_logprobs=torch.tensor([-1.0, -1.5, -4.0, 99.0, -9999.0]),
    )
    out, metrics = taught(inputs, ModelTeacher(path="x", coef=2.0, most_nats=5.0))
    # A + 2 · (log π_T - log π_prox): differences 0, 0.5, -1, masked, -5 at most
    assert out.advantages.tolist() == [0.5, 1.5, -3.0, -1.0, -11.0]
    assert metrics["teacher/kl"].value() == pytest.approx((-0 - 0.5 + 1 + 9998.5) / 4)
    with pytest.raises(RecordError, match="scored by no teacher"):
        taught(dataclasses.replace(inputs, teacher_logprobs=None), ModelTeacher(path="x"))


@pytest.mark.parametrize("objective", ["acr", "tis", "ppo", "cispo", "tbpo"])
def test_a_teacher_equal_to_the_student_teaches_nothing(make_run: MakeRun, objective: str):
    settings = ["learner.minibatches=1", "learner.optimizer.lr=1e-3", TEACHER]
    run = make_run(*settings, f"learner.objective.type={objective}")
    policy = build_policy(run)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    teacher = ModelBeside(initial_model(run), run.learner, 1.0)
    groups = teacher.scored(drawn(run, policy.model, run.learner.groups))
    values = learnt(run, policy, groups)
    assert (values["teacher/kl"], values["teacher/kl_k3"], values["train/grad_norm"]) == (0, 0, 0)
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())


def test_the_kl_to_the_teacher_falls(make_run: MakeRun):
    """The teacher is of another size; rewards are all equal, so that it alone teaches."""
    more = ["learner.groups=16", "learner.group_size=8", "learner.optimizer.lr=3e-3"]
    run = make_run(*more, TEACHER, "learner.minibatches=1")
    large = make_run("model.width=64", "model.layers=3", "seed=7")
    policy, teacher = build_policy(run), ModelBeside(initial_model(large), run.learner, 1.0)
    kls = []
    for step in range(40):
        groups = drawn(run, policy.model, run.learner.groups, seed=step, reward=1.0)
        kls.append(learnt(run, policy, teacher.scored(groups))["teacher/kl"])
    assert sum(kls[-5:]) < 0.4 * sum(kls[:5])


def test_groups_of_any_packing_get_the_teachers_log_probs(make_run: MakeRun):
    run = make_run(TEACHER, "rollout.sampling.temperature=0.5")
    model = initial_model(make_run("seed=3"))
    groups = drawn(run, initial_model(run), 4)
    cut = replace(run.learner, microbatch_tokens=12)
    found = [ModelBeside(model, cfg, 0.5).scored(groups) for cfg in (run.learner, cut)]
    for group, other in zip(*found, strict=True):
        for t, u in zip(group.trajectories, other.trajectories, strict=True):
            ids = torch.tensor([*group.ticket.prompt_ids.numpy(), *t.response_ids.numpy()])
            with torch.no_grad():
                logits = model.logits(model(ids, PackedLayout.of([len(ids)])))
            wanted = (logits / 0.5).log_softmax(-1)[3:-1].gather(1, ids[4:, None]).squeeze(1)
            for one in (t, u):
                assert one.teacher_logprobs is not None
                np.testing.assert_allclose(one.teacher_logprobs.numpy(), wanted, atol=1e-5)


def test_the_log_keeps_what_the_teacher_said(make_run: MakeRun):
    run = make_run()
    groups = drawn(run, initial_model(run), 2)
    said = [np.arange(5, dtype=np.float32) / 3 - n for n in range(4)]
    scored = with_logprobs(groups, said)
    table = groups_to_table(3, 3, scored)
    assert groups_from_table(table) == scored
    assert groups_from_table(groups_to_table(3, 3, groups)) == groups


class FakeServer:
    """OpenAI's completions around a small model; `answers` are statuses, or functions of an answer."""

    def __init__(self, model: Decoder) -> None:
        self.asked: list[dict[str, Any]] = []
        self.answers: list[int | Callable[[dict[str, Any]], Any]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.reply(200, {"data": [{"id": "the-teacher"}]})

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.asked.append(body | {"authorization": self.headers["Authorization"]})
                answer = outer.answers.pop(0) if outer.answers else 200
                if isinstance(answer, int) and answer != 200:
                    return self.reply(answer, {"error": "of a test"})
                given = outer.completion(model, body["prompt"])
                self.reply(200, given if answer == 200 else answer(given))  # type: ignore[operator]

            def reply(self, code: int, said: Any) -> None:
                data = json.dumps(said).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/"

    @staticmethod
    def completion(model: Decoder, ids: list[int]) -> dict[str, Any]:
        tokens = torch.tensor(ids)
        with torch.no_grad():
            logp = model.logits(model(tokens, PackedLayout.of([len(ids)]))).log_softmax(-1)
        own = logp[:-1].gather(1, tokens[1:, None]).squeeze(1).tolist()
        drawn = float(logp[-1].max())
        return {"choices": [{"logprobs": {"token_logprobs": [None, *own, drawn]}}]}


@pytest.fixture
def served(make_run: MakeRun) -> Iterator[FakeServer]:
    server = FakeServer(initial_model(make_run("seed=3")))
    thread = threading.Thread(target=server.http.serve_forever)
    thread.start()
    yield server
    server.http.shutdown()
    thread.join()
    server.http.server_close()


class Unhurried(threading.Event):
    """A learner's stop for which nobody waits; `stops` says at which wait it comes."""

    def __init__(self, stops: int = 99) -> None:
        super().__init__()
        self.waits: list[float] = []
        self.stops = stops

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout or 0.0)
        if len(self.waits) == self.stops:
            self.set()
        return self.is_set()


def test_a_server_says_what_the_model_itself_says(
    make_run: MakeRun,
    served: FakeServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    dead_proxy: None,
):
    key = tmp_path / "key"
    key.write_text("secret\n")
    monkeypatch.setenv("AREAL_Q_TEACHER_TOKEN_FILE", str(key))
    run, answers = make_run(), []
    teacher = Server(ServerTeacher(url=served.url), lambda: answers.append(1), Unhurried())
    groups = drawn(run, initial_model(run), 3)
    beside = ModelBeside(initial_model(make_run("seed=3")), run.learner, 1.0)
    for one, other in zip(teacher.scored(groups), beside.scored(groups), strict=True):
        for t, u in zip(one.trajectories, other.trajectories, strict=True):
            assert t.teacher_logprobs and u.teacher_logprobs
            np.testing.assert_allclose(
                t.teacher_logprobs.numpy(), u.teacher_logprobs.numpy(), atol=1e-5
            )
    assert len(answers) == 6
    first = served.asked[1]
    assert (first["model"], first["authorization"]) == ("the-teacher", "Bearer secret")
    assert (first["echo"], first["max_tokens"], len(first["prompt"])) == (True, 1, 9)


def test_a_server_that_is_busy_is_asked_again(served: FakeServer):
    served.answers = [503, 429]
    Server(ServerTeacher(url=served.url, retries=2), lambda: None, stop := Unhurried())
    assert stop.waits == [1.0, 2.0]
    served.answers = [500] * 3
    with pytest.raises(TeacherUnavailable, match=r"/v1/completions: no answer to 3 requests: 500"):
        Server(ServerTeacher(url=served.url, retries=2), lambda: None, Unhurried())
    served.http.shutdown()
    served.http.server_close()
    with pytest.raises(TeacherUnavailable, match=r"no answer to 1 requests: .*refused"):
        Server(ServerTeacher(url=served.url, retries=0), lambda: None, Unhurried())


def test_a_stop_is_heard_between_two_requests(make_run: MakeRun, served: FakeServer):
    served.answers = [500] * 9
    with pytest.raises(Stopped, match="/v1/completions"):
        Server(ServerTeacher(url=served.url), lambda: None, Unhurried(stops=2))
    assert len(served.asked) == 2
    served.answers = []
    run, stop = make_run(), Unhurried()
    teacher = Server(ServerTeacher(url=served.url, connections=1), stop.set, stop)
    with pytest.raises(Stopped):
        teacher.scored(drawn(run, initial_model(run), 3))


def test_a_stop_while_a_teacher_scores_ends_the_learner(make_run: MakeRun):
    """Its groups were not learnt from: a checkpoint finds them where they were."""
    learner = Mock(step=3, over=False, teacher=Mock(), run=make_run())
    learner.teacher.scored.side_effect = Stopped("while it was asked")
    Learner.take_steps(learner, threading.Event())
    assert learner.step == 3
    learner.group_reader.consumed.assert_not_called()
    learner.logs.append.assert_not_called()


def said(logprob: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda given: {"choices": [{"logprobs": {"token_logprobs": [None, logprob]}}]}


def one_more(given: dict[str, Any]) -> dict[str, Any]:
    given["choices"][0]["logprobs"]["token_logprobs"].insert(0, None)
    return given


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (400, "refuses: 400 .*of a test"),
        (401, "refuses: 401"),
        (lambda given: {"choices": [{"logprobs": None}]}, "gives no log-probs of a prompt"),
        (lambda given: {}, "gives no log-probs of a prompt"),
        (said("x"), "gives no log-probs of a prompt"),
        (said(-(10**400)), "gives no log-probs of a prompt"),
        (one_more, "where 2 ids and one more were asked for"),
    ],
)
def test_a_server_that_cannot_teach_is_refused(served: FakeServer, answer: Any, reason: str):
    served.answers = [answer]
    with pytest.raises(ConfigError, match=rf"learner\.teacher\.url: http://127.*{reason}"):
        Server(ServerTeacher(url=served.url, model="x"), lambda: None, Unhurried())
    assert len(served.asked) == 1, "it is not asked again"


def test_a_quantized_model_is_sent_to_a_server(make_run: MakeRun, tmp_path: Path):
    save_decoder(initial_model(make_run()), tmp_path / "big", CharTokenizer())
    file = tmp_path / "big" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"bits": 4}}))
    run = make_run(f"learner.teacher={{type='model', path='{tmp_path / 'big'}'}}")
    with pytest.raises(CheckpointError, match=r"quantized already.*teacher\.type = 'server'"):
        build_teacher(run, CharTokenizer(), lambda: None, threading.Event())
    (tmp_path / "big" / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"^learner\.teacher\.path") as missing:
        build_teacher(run, CharTokenizer(), lambda: None, threading.Event())
    assert "server" not in str(missing.value)


def teacher_at(make_run: MakeRun, path: Path, *more: str) -> Any:
    run = make_run(f"learner.teacher={{type='model', path='{path}'}}", "rollout.workers=0", *more)
    assert check_model(run), "`areal-q check` takes it"
    return build_teacher(run, CharTokenizer(), lambda: None, threading.Event())


def log_probs(groups: list[Group]) -> list[list[float]]:
    found = [t.teacher_logprobs for group in groups for t in group.trajectories]
    return [one.numpy().tolist() for one in found if one]


@pytest.mark.parametrize("format", [*QUANTIZATION_CONFIGS])
def test_a_quantized_teacher_says_what_its_numbers_say(
    make_run: MakeRun, tmp_path: Path, format: str
):
    run = make_run("model.width=64", "seed=3")
    model = initial_model(run)
    save_decoder(model, tmp_path / "source", CharTokenizer())
    quantize(tmp_path / "source", tmp_path / "made", format, torch.bfloat16)
    groups = drawn(make_run(), initial_model(make_run()), 3)
    said = log_probs(teacher_at(make_run, tmp_path / "made").scored(groups))
    unlike = log_probs(ModelBeside(model, run.learner, 1.0).scored(groups))
    published = quantize_state(model.state_dict(), format)
    numbers = dequantize_state(rest_in_bf16(published, format), format)
    model.load_state_dict(numbers)
    assert said == log_probs(ModelBeside(model, run.learner, 1.0).scored(groups)) != unlike


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_teacher_of_any_family_says_what_transformers_says(
    make_run: MakeRun, tmp_path: Path, family: str
):
    tokenizer = CharTokenizer()
    write_foreign(tmp_path, family)
    tokenizer.save(str(tmp_path))
    groups = drawn(make_run(), initial_model(make_run()), 3)
    said = log_probs(teacher_at(make_run, tmp_path).scored(groups))
    net = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    answers = [(group.ticket.prompt_ids.numpy(), t) for group in groups for t in group.trajectories]
    for (prompt, t), given in zip(answers, said, strict=True):
        ids = torch.tensor([*prompt, *t.response_ids.numpy()])
        with torch.no_grad():
            logp = net(ids[None]).logits[0].log_softmax(-1)
        wanted = logp[len(prompt) - 1 : -1].gather(1, ids[len(prompt) :, None]).squeeze(1)
        np.testing.assert_allclose(given, wanted, atol=1e-4)


def test_a_foreign_teacher_has_no_more_in_a_pass_than_it_may(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """transformers computes each path whole, also where many share a prompt: passes were too large."""
    write_foreign(tmp_path, next(iter(FAMILIES)))
    CharTokenizer().save(str(tmp_path))
    prompt = list(range(2, 18))
    ticket = make_ticket(prompt_ids=Array.of(prompt, "int32"), group_size=4)
    group = make_group(ticket, trajectories=[make_trajectory(n, [3, 4], -1.0) for n in range(4)])
    passes: list[int] = []

    def seen(samples: Sequence[Sample], device: str) -> object:
        passes.append(sum(len(s.prompt_ids) + s.trajectory.num_tokens for s in samples))
        return pack_samples(samples, device)

    monkeypatch.setattr("learner.measure.rescore.pack_samples", seen)
    teacher_at(make_run, tmp_path, "learner.microbatch_tokens=40").scored([group])
    assert passes == [36, 36]


Tensors = dict[str, torch.Tensor]


def without(name: str) -> Callable[[Tensors], Any]:
    return lambda tensors: tensors.pop(name)


UP = "model.layers.0.mlp.up_proj"
RUINED: dict[str, tuple[Callable[[Tensors], Any], str, bool]] = {
    "no codes": (without(f"{UP}.weight_packed"), f"{UP}: no tensor '{UP}.weight_packed'", True),
    "no scale": (without(f"{UP}.weight_scale"), f"{UP}: no tensor '{UP}.weight_scale'", True),
    "no norm": (without("model.norm.weight"), "model.norm.weight is missing", True),
    "a tensor more": (lambda ts: ts.update(x=torch.zeros(1)), "unexpected tensor x", True),
    "codes of another shape": (
        lambda ts: ts.update({f"{UP}.weight_packed": ts[f"{UP}.weight_packed"][:-1].clone()}),
        f"{UP}.weight is missing, or has another shape",
        True,
    ),
    "a scale in half": (
        lambda ts: ts.update({f"{UP}.weight_scale": ts[f"{UP}.weight_scale"].half()}),
        f"{UP}.weight_scale is F16",
        True,
    ),
    "another width beside the codes": (
        lambda ts: ts[f"{UP}.weight_shape"].fill_(3),
        f"{UP}.weight is no int4-g32 of shape",
        False,
    ),
    "a negative width": (lambda ts: ts[f"{UP}.weight_shape"].fill_(-(2**62)), "int4-g32", False),
    "a scale that is NaN": (
        lambda ts: ts[f"{UP}.weight_scale"].fill_(float("nan")),
        f"{UP}.weight is no int4-g32",
        False,
    ),
}
"""What becomes of the tensors, what is said of it, and whether their headers show it"""


@pytest.mark.parametrize("ruin", RUINED)
def test_a_ruined_quantized_teacher_is_refused_in_a_line(
    make_run: MakeRun, tmp_path: Path, ruin: str
):
    save_decoder(initial_model(make_run()), tmp_path / "source", CharTokenizer())
    quantize(tmp_path / "source", tmp_path / "made", "int4-g32", torch.bfloat16)
    file = tmp_path / "made" / "model.safetensors"
    tensors = load_file(file)
    change, said, in_headers = RUINED[ruin]
    change(tensors)
    save_file(tensors, file)
    run = make_run(f"learner.teacher={{type='model', path='{tmp_path / 'made'}'}}")
    with pytest.raises(CheckpointError, match=re.escape(said)) as error:
        build_teacher(run, CharTokenizer(), lambda: None, threading.Event())
    assert "\n" not in str(error.value)
    if in_headers:
        with pytest.raises(CheckpointError, match=re.escape(said)):
            check_model(run)


def test_a_model_with_another_tokenizer_is_refused(make_run: MakeRun, tmp_path: Path):
    tokenizer = CharTokenizer()
    save_decoder(initial_model(make_run("model.width=64")), tmp_path / "large", tokenizer)
    write_chain(tmp_path / "chain", "abc")

    def teacher(name: str) -> Any:
        path = f"learner.teacher={{type='model', path='{tmp_path / name}'}}"
        return build_teacher(make_run(path), tokenizer, lambda: None, Unhurried())

    assert isinstance(teacher("large"), ModelBeside)
    path = f"learner.teacher={{type='model', path='{tmp_path / 'large'}'}}"
    shape = shape_of(make_run().model, tokenizer)
    large = load_config(tmp_path / "large").weights
    parts = learner_memory(make_run(path), shape, Lengths(4, 4))
    assert [part.nbytes for part in parts if part.name == "teacher"] == [4 * large]
    with pytest.raises(ConfigError, match=r"learner\.teacher\.path = .*tokenizer is not"):
        teacher("chain")


def test_a_teacher_has_room_for_what_it_scores(make_run: MakeRun, tmp_path: Path):
    """A longer text ended with an IndexError, or was scored at positions that it never met."""
    tokenizer, at = CharTokenizer(), tmp_path / "short"
    save_decoder(initial_model(make_run("model.max_positions=16")), at, tokenizer)
    given = f"learner.teacher={{type='model', path='{at}'}}"
    fits = make_run(given, "rollout.sampling.max_tokens=6")
    assert longest_prompt(fits, shape_of(fits.model, tokenizer)) == 16 - 6
    run = make_run(given, "rollout.sampling.max_tokens=16")
    said = r"^rollout\.sampling\.max_tokens = 16 and a prompt do not fit into the teacher's 16 positions$"
    with pytest.raises(ConfigError, match=said):
        check_model(run)
    with pytest.raises(ConfigError, match=said):
        build_learner(
            run, tmp_path, "redis://127.0.0.1:1", "tcp://127.0.0.1:*", "tcp://127.0.0.1:*",
            False, threading.Event(),
        )  # fmt: skip
    ticket = make_ticket(prompt_ids=Array.of([*range(2, 12)], "int32"), group_size=1)
    teacher = teacher_at(make_run, at, "rollout.sampling.max_tokens=6")
    whole, longer = (
        make_group(ticket, trajectories=[make_trajectory(0, [3] * tokens, -1.0)])
        for tokens in (6, 7)
    )
    assert np.isfinite(log_probs(teacher.scored([whole]))).all()
    with pytest.raises(ConfigError, match=r"path: 17 tokens do not fit .* 16 positions$"):
        teacher.scored([longer])


def test_a_teacher_on_a_device_that_is_not_here_is_refused(make_run: MakeRun, tmp_path: Path):
    """In a line, as without a teacher, whose weights are the first that a learner moves there."""
    save_decoder(initial_model(make_run()), tmp_path, CharTokenizer())
    with pytest.raises(ConfigError, match=r"^learner\.device = 'xpu:99': "):
        teacher_at(make_run, tmp_path, "learner.device=xpu:99")


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ("learner.drop_uniform=true", "learner.drop_uniform"),
        ("buffer.sampler.type=prioritized", "prioritized"),
        ("rollout.sampling.temperature=0.5", "at temperature 1"),
    ],
)
def test_settings_that_a_teacher_cannot_serve_are_refused(
    make_run: MakeRun, setting: str, named: str
):
    with pytest.raises(SettingsError, match=named):
        make_run(setting, "learner.teacher={type='server', url='http://127.0.0.1:1/v1'}")


def test_where_a_teacher_is_may_change_in_a_resumption(make_run: MakeRun, tmp_path: Path):
    at = "learner.teacher={type='server', url='http://127.0.0.1:1/v1'}"
    with claimed(make_run(at, f"root={tmp_path}"), resume=False) as (directory, _):
        (directory / "checkpoints" / "step-000001").mkdir(parents=True)
    moved = ["url=http://127.0.0.1:2/v1", "model=x", "connections=2", "timeout_s=9", "retries=1"]
    again = resumed(directory, [f"learner.teacher.{one}" for one in moved]).learner.teacher
    assert isinstance(again, ServerTeacher) and (again.url[-4:], again.retries) == ("2/v1", 1)
    with pytest.raises(ConfigError, match=r"learner\.teacher\.coef: cannot change"):
        resumed(directory, ["learner.teacher.coef=2.0"])
