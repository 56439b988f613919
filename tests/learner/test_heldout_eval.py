"""Evaluations during a run, over a real buffer: complete with what can still be answered."""

import asyncio
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.fixture_types import Buffers
from msgspec.structs import replace

from areal_q.config import EvalConfig, LearnerConfig, Run
from areal_q.messages import Array, Branch, Ticket, VersionSpan, WorkerStatus
from areal_q.observability.metrics_log import MetricsLog, Record, read_metrics
from areal_q.tasks import Tokenizer, build_task, build_tokenizer, columns_for
from bench.records import make_beat
from learner.data.admission import Admission
from learner.data.eval_sets import problems_of_sets
from learner.heldout_eval import BestVersion, HeldOutEvaluation, set_metrics


@pytest.fixture
def metrics(tmp_path: Path):
    with MetricsLog(tmp_path, tensorboard=False) as log:
        yield log


@pytest.fixture
def heldout(make_run, buffers: Buffers, metrics: MetricsLog, monkeypatch) -> HeldOutEvaluation:
    run = make_run("eval.problems=3")
    learner, tokenizer = buffers.learner(), build_tokenizer(run.model, run.task)
    admission = Admission(run, build_task(run.task), tokenizer, learner, 0, set())
    # The answers' tokens are of no vocabulary.
    monkeypatch.setattr(tokenizer, "decode", str)
    return HeldOutEvaluation(admission, learner, tokenizer, metrics, run)


async def answer(buffers: Buffers, make_group, poison: set[int]) -> None:
    """A worker that answers every open ticket but those numbers, which it sets aside."""
    async with buffers.worker("w") as worker:
        for claim in await worker.claim(100, block_s=0.0):
            if claim.ticket.number in poison:
                await worker.quarantine(claim, "its prompt is too long")
            else:
                await worker.commit(claim, make_group(claim.ticket))


def evaluations(tmp_path: Path) -> dict[int, float]:
    records = read_metrics(tmp_path / "metrics.jsonl")
    return {r["step"]: r["eval/problems"] for r in records if r["kind"] == "eval"}


def test_an_evaluation_ends_without_quarantined_tickets(heldout, make_group, buffers, tmp_path):
    heldout.ask(0)
    asyncio.run(answer(buffers, make_group, poison={1}))

    heldout.finish(threading.Event(), timeout_s=600.0)

    assert evaluations(tmp_path) == {0: 2}


@pytest.mark.parametrize("lost", ["more", ""])
def test_a_set_of_which_nothing_came_is_told_by_its_name(
    make_run, make_group, buffers, metrics, tmp_path, lost: str, caplog
):
    """It was told as the held-out problems, or beside those not at all."""
    evaluation = evaluation_of(
        make_run("eval.problems=3", "eval.sets.more.problems=2"), buffers, metrics, decoding()
    )
    sets = evaluation.due(0)
    asked = [one for one in sets if one.name == "more"] if lost else sets
    poison = {n for one in asked if one.name == lost for n in range(one.first, one.first + 3)}
    evaluation.ask(0, asked)
    asyncio.run(answer(buffers, make_group, poison))
    evaluation.finish(threading.Event(), timeout_s=600.0)
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    found = {name: n for name, n in record.items() if name.endswith("/problems")}
    assert found == (
        {"eval/more/problems": 0} if lost else {"eval/problems": 0, "eval/more/problems": 2}
    )
    where = " of the set more" if lost else ""
    assert f"evaluation{where} at version 0: no answer could be scored" in caplog.text


def test_an_evaluation_waits_for_its_open_tickets(
    heldout, make_group, buffers, tmp_path, monkeypatch
):
    monkeypatch.setattr("learner.heldout_eval.LOOK_S", 0.0)
    heldout.ask(0)
    asyncio.run(answer(buffers, make_group, poison={0}))
    heldout.ask(10)

    heldout.collect()
    heldout.collect()
    assert evaluations(tmp_path) == {0: 2}

    asyncio.run(answer(buffers, make_group, poison=set()))
    heldout.collect()
    assert evaluations(tmp_path) == {0: 2, 10: 3}


def test_an_answer_without_a_score_is_neither_right_nor_wrong(
    heldout, make_group, buffers, tmp_path
):
    async def fail() -> None:
        async with buffers.worker("w") as worker:
            for claim in await worker.claim(100, block_s=0.0):
                group = make_group(claim.ticket)
                failed = {"valid": False, "failure": "exception", "reward": 0.0, "reward_parts": {}}
                trajectories = [replace(t, **failed) for t in group.trajectories]
                await worker.commit(claim, replace(group, trajectories=trajectories))

    heldout.ask(0)
    asyncio.run(fail())
    heldout.collect()

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert [sample["correct"] for sample in record["samples"]] == [None] * 3
    assert record["eval/invalid"] == 3 and "eval/accuracy" not in record


@pytest.mark.parametrize("environment", ["single", "calculator", "external"])
def test_episodes_are_measured_however_short_they_are(
    make_run, make_group, buffers, metrics, tmp_path, environment
):
    """All of one turn, and one of them failed at once; answers of a single turn have no such metrics."""
    room = "model.max_positions=256"
    run = make_run("eval.problems=3", f"rollout.environment.type={environment}", room)
    evaluation = evaluation_of(run, buffers, metrics, decoding())

    async def play() -> None:
        async with buffers.worker("w") as worker:
            for claim in await worker.claim(100, block_s=0.0):
                group = make_group(claim.ticket)
                of_one = {"loss_mask": Array.of(np.ones(group.trajectories[0].num_tokens), "uint8")}
                if claim.ticket.number == 1:
                    of_one |= {"valid": False, "failure": "timeout", "reward": 0.0}
                (t,) = group.trajectories
                await worker.commit(claim, replace(group, trajectories=[replace(t, **of_one)]))

    evaluation.ask(0)
    asyncio.run(play())
    evaluation.collect()
    [record] = read_metrics(tmp_path / "metrics.jsonl")
    found = {name: record.get(f"eval/{name}") for name in ("turns", "reward", "invalid/timeout")}
    if environment == "single":
        assert set(found.values()) == {None} and record["eval/invalid"] == 1
    else:
        assert found == {"turns": 1.0, "reward": 0.0, "invalid/timeout": 1.0}


def test_turns_on_branches_are_counted(make_ticket, make_group):
    group = make_group(make_ticket(group_size=1))
    (t,) = group.trajectories
    mask = Array.of(np.array([1, 0, 1]), "uint8")
    three: dict[str, Any] = {"response_ids": Array.of([4, 5, 6], "int32"), "loss_mask": mask}
    three["behavior_logprobs"] = Array.of([-1.0, 0.0, -1.0], "float32")
    spans = [VersionSpan(0, 3, "a0")]
    branch = Branch(parent=0, at=1, spans=spans, finish_reason="stop", **three)
    t = replace(t, spans=spans, branches=(branch, branch), **three)
    assert set_metrics([replace(group, trajectories=[t])], episodes=True)["turns"] == 6.0


def test_weights_newer_than_those_evaluated_are_told(make_ticket, make_group):
    group = make_group(make_ticket(group_size=1, step=3))
    (t,) = group.trajectories
    n = len(t.response_ids.numpy())
    t = replace(t, spans=[VersionSpan(3, n - 1, "a3"), VersionSpan(8, 1, "a8")])
    late = set_metrics([replace(group, trajectories=[t])], episodes=False)["late_by"]
    assert late == pytest.approx(5 / n)


def test_an_evaluation_that_nobody_answers_is_given_up_aloud(heldout, tmp_path):
    heldout.ask(4)
    looked: list[int] = []
    heldout.finish(threading.Event(), timeout_s=0.01, meanwhile=lambda: looked.append(1))

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert (record["kind"], record["step"]) == ("warning", 4) and looked
    assert re.search(r"version 4 is given up: 0 of 3 problems are answered", record["message"])


def test_workers_that_draw_are_waited_for(heldout, make_group, buffers, tmp_path, monkeypatch):
    """A long response once cost the last evaluation, the answers that were there included."""
    heldout.ask(4)
    looks: list[int] = []

    def workers() -> list[WorkerStatus]:
        looks.append(1)
        if len(looks) == 3:
            asyncio.run(answer(buffers, make_group, poison=set()))
        return [make_beat(tokens_per_s=9.0)]

    monkeypatch.setattr(heldout._buffer, "workers", workers)
    monkeypatch.setattr("learner.heldout_eval.LONGEST_WAITS", 1000)
    heldout.finish(threading.Event(), timeout_s=0.01)
    assert evaluations(tmp_path) == {4: 3}


def test_workers_that_draw_for_others_are_not_waited_for_long(heldout, tmp_path, monkeypatch):
    monkeypatch.setattr(heldout._buffer, "workers", lambda: [make_beat(tokens_per_s=9.0)])
    heldout.ask(4)
    heldout.finish(threading.Event(), timeout_s=0.01)
    assert [record["kind"] for record in read_metrics(tmp_path / "metrics.jsonl")] == ["warning"]


def test_what_is_asked_again_after_a_crash_counts_once(heldout, make_group, buffers, tmp_path):
    """The first learner had asked the same, and its answers are still there."""
    heldout.ask(4)
    asyncio.run(answer(buffers, make_group, poison={2}))
    heldout.ask(4)
    asyncio.run(answer(buffers, make_group, poison=set()))
    heldout.finish(threading.Event(), timeout_s=600.0)

    assert evaluations(tmp_path) == {4: 3}


@pytest.mark.parametrize(
    ("version", "recorded", "missed"),
    [
        (5, [(4, ""), (3, "more")], []),
        (5, [(2, ""), (3, "more")], [""]),  # that of version 4 was pending
        (6, [(4, ""), (3, "more")], ["", "more"]),
        (7, [(7, "more"), (6, "")], []),  # asked again at 7, after another crash
        (3, [], ["", "more"]),
    ],
)
def test_sets_without_their_newest_evaluation_are_missed(
    make_run, buffers, metrics, more, version, recorded, missed
):
    run = make_run("eval.problems=3", "eval.every=2", more)
    records = [
        {"kind": "eval", "step": step, f"eval/{name}/problems".replace("//", "/"): 3.0}
        for step, name in recorded
    ]
    evaluation = evaluation_of(run, buffers, metrics, decoding(), version, records)
    assert [one.name for one in evaluation.missed] == missed


def decoding() -> Tokenizer:
    """A tokenizer that decodes any ids, as those of answers made up here."""
    tokenizer = build_tokenizer(Run().model, Run().task)
    vars(tokenizer)["decode"] = str
    return tokenizer


async def answer_right(buffers: Buffers, make_group, right: int) -> None:
    """A worker that answers everything, `right` of the responses to each problem rightly."""
    async with buffers.worker("w") as worker:
        for claim in await worker.claim(1000, block_s=0.0):
            group = make_group(claim.ticket)
            trajectories = [
                replace(t, reward_parts={"correct": float(t.index < right)})
                for t in group.trajectories
            ]
            await worker.commit(claim, replace(group, trajectories=trajectories))


def evaluation_of(
    run: Run,
    buffers: Buffers,
    metrics: MetricsLog,
    tokenizer,
    start: int = 0,
    records: Sequence[Record] = (),
) -> HeldOutEvaluation:
    learner, task = buffers.learner(), build_task(run.task, columns_for(run))
    own = problems_of_sets(run, build_tokenizer(run.model, run.task), longest=20)
    admission = Admission(
        run, task, build_tokenizer(run.model, run.task), learner, 0, set(),
        own_sets=own,
    )  # fmt: skip
    return HeldOutEvaluation(admission, learner, tokenizer, metrics, run, start, records)


@pytest.fixture
def more(tmp_path: Path) -> str:
    """Settings of an evaluation set with a file of its own."""
    path = tmp_path / "more.jsonl"
    path.write_text("".join(f'{{"prompt": "{n}+1=", "answer": "{n}"}}\n' for n in range(5)))
    return (
        f'eval.sets.more={{ task = {{ type = "jsonl", path = "{path}" }}, samples = 4, every = 3 }}'
    )


def test_a_set_is_asked_in_its_own_way_and_measured(
    make_run, make_group, buffers, metrics, tmp_path, more
):
    run = make_run("eval.problems=3", "eval.every=2", more, "eval.sets.again.samples=2")
    evaluation = evaluation_of(run, buffers, metrics, decoding())

    assert [[one.name for one in evaluation.due(step)] for step in (0, 2, 3, 5)] == [
        ["", "more", "again"],
        ["", "again"],
        ["more"],
        [],
    ]
    evaluation.ask(0)

    async def look() -> list[Ticket]:
        async with buffers.worker("look") as worker:
            return [claim.ticket for claim in await worker.claim(100, block_s=0.0)]

    asked = asyncio.run(look())
    assert [(t.source, t.group_size, t.sampling.temperature) for t in asked] == [
        *[("", 1, 0.0)] * 3,
        *[("more", 4, 1.0)] * 3,
        *[("", 2, 1.0)] * 3,
    ]


def test_the_metrics_of_a_set_are_those_of_its_answers(
    make_run, make_group, buffers, metrics, tmp_path, more
):
    run = make_run("eval.problems=3", more, "eval.best=eval/more/pass_at_2")
    evaluation = evaluation_of(run, buffers, metrics, decoding())
    evaluation.ask(0)
    asyncio.run(answer_right(buffers, make_group, right=1))
    evaluation.collect()

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    found = {k.removeprefix("eval/"): v for k, v in record.items() if k.startswith("eval/")}
    assert found.keys() >= {"late_by", "more/late_by"}
    assert {k: v for k, v in found.items() if "late_by" not in k} == {
        **{"accuracy": 1.0, "problems": 3.0, "invalid": 0.0},
        **{"more/accuracy": 0.25, "more/problems": 3.0, "more/invalid": 0.0},
        **{"more/pass_at_2": 0.5, "more/pass_at_4": 1.0},
    }
    assert (evaluation.best.step, evaluation.best.value) == (0, 0.5)


def test_an_evaluation_of_sets_alone_leaves_the_accuracy(
    make_run, make_group, buffers, metrics, tmp_path, more
):
    evaluation = evaluation_of(make_run("eval.every=2", more), buffers, metrics, decoding())
    evaluation.ask(3, evaluation.due(3))
    asyncio.run(answer_right(buffers, make_group, right=4))
    evaluation.collect()

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert record["eval/more/accuracy"] == 1.0
    assert "eval/accuracy" not in record and "eval/problems" not in record
    assert evaluation.accuracy is None


def test_a_mixture_is_evaluated_by_its_tasks(make_run, make_group, buffers, metrics, tmp_path):
    run = make_run(
        "task={type='mix', sources={a={task={type='arithmetic', digits=1, heldout=8}},"
        " b={task={type='countdown', problems=20, heldout=8}}}}",
        "eval.problems=4",
    )
    evaluation = evaluation_of(run, buffers, metrics, decoding())
    evaluation.ask(0)
    asyncio.run(answer_right(buffers, make_group, right=1))
    evaluation.collect()

    [record] = read_metrics(tmp_path / "metrics.jsonl")
    assert {k: v for k, v in record.items() if k.endswith(("accuracy", "problems"))} == {
        **{"eval/accuracy": 1.0, "eval/problems": 4.0},
        **{"eval/a/accuracy": 1.0, "eval/a/problems": 2.0},
        **{"eval/b/accuracy": 1.0, "eval/b/problems": 2.0},
    }


@pytest.mark.parametrize(
    ("values", "best", "gives_up"),
    [
        ([0.1, 0.3, 0.2], (2, 0.3), [False, False, False]),
        ([0.3, 0.3, 0.3], (0, 0.3), [False, False, True]),
        ([0.3, 0.2, 0.2, 0.9], (6, 0.9), [False, False, True, True]),
        ([0.3, 0.2, None, 0.4, 0.1, 0.1], (6, 0.4), [False, False, False, False, False, True]),
    ],
)
def test_the_best_version_is_the_first_with_the_largest_value(values, best, gives_up):
    run = Run(eval=EvalConfig(best="eval/accuracy", patience=2))
    found = BestVersion(run)
    records = [
        {"kind": "eval", "step": 2 * i} | ({} if value is None else {"eval/accuracy": value})
        for i, value in enumerate(values)
    ]
    told = []
    for record in records:
        found.add(record["step"], record)
        told.append(found.given_up)

    assert ((found.step, found.value), told) == (best, gives_up)
    again = BestVersion(run, records)
    assert (again.step, again.value, again.since) == (found.step, found.value, found.since)


@pytest.mark.parametrize(
    ("every", "max_lag", "lates", "measured"),
    [
        (50, 2, (0.0, 2.0, 2.1, 49.0), (0, 50)),
        (50, 0, (0.0, 1.0, 1.1, 51.0), (0, 50)),
        (1, 4, (0.0, 0.9, 1.0, 3.0), (0, 1)),  # the next one measures that version
    ],
)
def test_a_late_evaluation_is_neither_the_best_nor_no_better(every, max_lag, lates, measured):
    cfg = EvalConfig(every=every, best="eval/accuracy", patience=1)
    run = Run(eval=cfg, learner=LearnerConfig(max_lag=max_lag))
    for rising in (True, False):
        best = BestVersion(run)
        for number, late in enumerate(lates):
            value = 0.1 * number if rising else 0.5 if number < len(measured) else -0.1 * number
            best.add(every * number, {"eval/accuracy": value, "eval/late_by": late})
        assert best.step == measured[-1 if rising else 0]
        assert best.since == (0 if rising else len(measured) - 1)


def test_checkpoints_that_may_be_the_best_are_spared(make_run, make_group, buffers, metrics, more):
    run = make_run("eval.problems=3", "eval.every=2", more, "eval.best=eval/more/accuracy")
    evaluation = evaluation_of(run, buffers, metrics, decoding())
    for step, right in ((0, 2), (2, 4), (3, 3)):
        evaluation.ask(step, evaluation.due(step))
        if step == 2:
            assert evaluation.spared == {0}
        asyncio.run(answer_right(buffers, make_group, right))
        evaluation.collect()
    evaluation.ask(6)

    assert [evaluation.may_be_best(step) for step in (0, 2, 3)] == [True, False, True]
    assert evaluation.spared == {3, 6}
    evaluation.best.step = 5  # the last step of a run that now goes on
    assert evaluation.spared == {5, 6}


def test_a_missed_evaluation_asked_elsewhere_is_spared(make_run, buffers, metrics, more):
    run = make_run("eval.problems=3", "eval.every=2", more, "eval.best=eval/more/accuracy")
    records = [{"kind": "eval", "step": 4, "eval/problems": 3.0}]
    evaluation = evaluation_of(run, buffers, metrics, decoding(), 4, records)
    assert not evaluation.may_be_best(4)
    evaluation.ask(4, evaluation.missed)
    assert evaluation.spared == {-1, 4}
