"""Mixtures: whose turn a ticket is, to within one ticket of the shares; whose problems; who judges them."""

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q.checks.settings import first_problems
from areal_q.config import Arithmetic, Run, load
from areal_q.errors import SettingsError, TaskError
from areal_q.tasks import (
    CharTokenizer,
    Completed,
    Problem,
    Task,
    build_reward,
    build_task,
    columns_for,
    problem_at,
)
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import MixedProblems, turn, turns
from learner.data.eval_sets import problems_of_sets


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any))
def test_any_prefix_has_its_shares_within_one(weights: list[int]):
    had, total = Counter[int](), sum(weights)

    for number in range(2 * total + 3):
        which, before = turn(tuple(weights), number)
        assert before == had[which]
        had[which] += 1
        for i, weight in enumerate(weights):
            assert abs(had[i] - Fraction((number + 1) * weight, total)) < 1


def test_turns_by_hand():
    assert turns((1,)) == [(0, 0)]
    assert turns((0, 2)) == [(1, 0)]
    assert [who for who, _ in turns((1, 1))] == [0, 1]
    assert Counter(who for who, _ in turns((300, 100))) == {0: 3, 1: 1}


def mixed(*settings: str) -> Run:
    sources = [
        'task.sources.sums={ weight = 3, task = { type = "arithmetic", digits = 1, heldout = 20 } }'
    ]
    sources += ['task.sources.down={ task = { type = "countdown", problems = 50, heldout = 4 } }']
    return load(None, ["task.type=mix", *sources, *settings])


@pytest.mark.parametrize("kind", ["generated", "file"])
def test_a_source_that_holds_out_all_is_named(kind: str, tmp_path: Path):
    task = '{ type = "arithmetic", digits = 1, heldout = 512 }'
    if kind == "file":
        (tmp_path / "a.jsonl").write_text('{"prompt": "p", "answer": "a"}\n')
        task = f'{{ type = "jsonl", path = "{tmp_path / "a.jsonl"}", heldout = 1 }}'
    run = mixed(f"task.sources.own={{ task = {task} }}")
    with pytest.raises(TaskError, match=r"task\.sources\.own\.task\.heldout = \d+ .*leaves none"):
        build_task(run.task)


def test_a_set_that_holds_out_all_is_named():
    run = load(None, ['eval.sets.own.task={ type = "arithmetic", digits = 1, heldout = 512 }'])
    words = r"^eval\.sets\.own\.task\.heldout = 512 leaves none"
    with pytest.raises(TaskError, match=words):
        problems_of_sets(run, CharTokenizer(), 32)
    with pytest.raises(TaskError, match=words):
        list(first_problems(run, build_task(run.task)))


def test_a_task_gets_its_problems_in_its_own_epochs():
    task = build_task(mixed().task)
    assert isinstance(task.train, MixedProblems) and list(task.train.parts) == ["down", "sums"]
    sums = task.train.parts["sums"]

    drawn = [problem_at(task, number, seed=7) for number in range(4 * len(sums))]

    its = [problem.prompt for problem in drawn if problem.source == "sums"]
    assert len(its) == 3 * len(sums)
    for epoch in range(3):
        assert sorted(its[epoch * len(sums) : (epoch + 1) * len(sums)]) == sorted(
            problem.prompt for problem in sums
        )


def test_joined_is_the_sequence_of_its_parts():
    joined = MixedProblems(
        {
            "b": [Problem("3", ""), Problem("4", "")],
            "a": Lazy(lambda i: Problem(str(i), ""), range(3)),
        },
        {"a": 1, "b": 1},
    )

    assert [(p.source, p.prompt) for p in joined] == [
        *(("a", c) for c in "012"),
        *(("b", c) for c in "34"),
    ]
    assert joined[-1].prompt == "4" and [p.prompt for p in joined[1:4]] == ["1", "2", "3"]
    with pytest.raises(IndexError):
        joined[5]


def test_any_beginning_of_the_held_out_has_all_tasks():
    heldout = build_task(mixed().task).heldout

    assert Counter(p.source for p in heldout[:8]) == {"sums": 4, "down": 4}
    assert Counter(p.source for p in heldout) == {"sums": 20, "down": 4}


def test_what_one_task_holds_out_no_other_trains_on(tmp_path: Path):
    lines = [f'{{"prompt": "{n}+1=", "answer": "x"}}\n' for n in range(10)]
    (tmp_path / "all.jsonl").write_text("".join(lines))
    file = f'type = "jsonl", path = "{tmp_path}/all.jsonl"'
    small = f"task.sources.a.task={{ {file}, heldout = 0.2 }}"
    large = f"task.sources.b.task={{ {file}, heldout = 0.5 }}"

    task = build_task(load(None, ["task.type=mix", small, large]).task)

    assert {p.prompt for p in task.heldout} == {f"{n}+1=" for n in range(5, 10)}
    assert {p.prompt for p in task.train} == {f"{n}+1=" for n in range(5)}
    (tmp_path / "one.jsonl").write_text('{"prompt": "0=", "answer": "0"}\n')
    one = f'type = "jsonl", path = "{tmp_path}/one.jsonl", heldout = "{tmp_path}/all.jsonl"'
    with pytest.raises(TaskError, match=r"sources\.a: others hold out all"):
        build_task(load(None, ["task.type=mix", small, f"task.sources.b.task={{ {one} }}"]).task)


def test_generated_problems_that_others_hold_out_are_passed_over(tmp_path: Path):
    """By place alone, so that a ticket's number stands for the same problem when a run resumes."""

    def task_of(sums: int, held: Sequence[Problem]) -> Task:
        rows = [json.dumps({"prompt": p.prompt, "answer": p.answer}) for p in held]
        (tmp_path / "held.jsonl").write_text("\n".join(rows))
        (tmp_path / "one.jsonl").write_text('{"prompt": "0=", "answer": "0"}\n')
        file = f"path='{tmp_path}/one.jsonl', heldout='{tmp_path}/held.jsonl'"
        tasks = [f"task.sources.file.task={{type='jsonl', {file}}}"]
        for name, heldout in (("few", 2), ("many", sums)):
            made = f"type='arithmetic', digits=1, heldout={heldout}"
            tasks.append(f"task.sources.{name}.task={{{made}}}")
        return build_task(load(None, ["task.type=mix", *tasks]).task)

    every = [*build_task(Arithmetic(digits=1, heldout=2)).train]
    task, again = (task_of(60, every[-20:]) for _ in range(2))
    kept = {problem.prompt for problem in task.heldout}
    assert len(task.train) == 1 + 108 + 50 and not kept & {p.prompt for p in task.train}
    assert {p.prompt for p in task.train if p.source == "few"} | kept >= {p.prompt for p in every}
    assert [*task.train] == [*again.train]
    with pytest.raises(TaskError, match=r"sources\.few: others hold out all"):
        task_of(60, every)


async def test_each_task_is_judged_by_its_own_reward(tmp_path: Path):
    (tmp_path / "third.py").write_text("def reward(response, row):\n    return row['worth'] / 4\n")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1=", "answer": "", "worth": 3}\n' * 2)
    rows = f'{{ type = "jsonl", path = "{tmp_path}/rows.jsonl", heldout = 0.5 }}'
    own = f'task.sources.own={{ task = {rows}, reward = {{ path = "{tmp_path}/third.py" }} }}'
    run = mixed(own, "task.sources.down.reward={ correct = 5.0 }")
    columns = columns_for(run)
    assert columns == {"down": (), "sums": (), "own": None}
    problems = {name: Problem("1=", "1", source=name) for name in ("sums", "down")} | {
        "own": Problem("1=", "", columns='{"worth": 3}', source="own")
    }
    right = {"sums": "1", "down": "1", "own": "whatever"}

    reward = build_reward(run)
    await reward.start()
    try:
        scores = {
            name: (await reward(problem, [Completed(right[name])]))[0]
            for name, problem in problems.items()
        }
    finally:
        await asyncio.shield(reward.close())

    assert scores["sums"].reward == 1.0
    assert scores["own"].reward == 0.75
    assert scores["down"].reward in (0.0, 5.0) and not scores["down"].failure


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("task.sources.sums.weight=0", "task.sources"),
        ('task.sources.sums.task={ type = "mix" }', "task.sources"),
        ("task.sources.sums.advantage=1", "advantage: no such setting"),
        (
            "learner.advantage={type='by_source', sources={sum={type='rloo'}}}",
            "learner.advantage.sources.sum: no task of the mixture has that name; it has sums, down",
        ),
        (
            "learner.advantage={type='by_source', sources={sums={type='gae'}}}",
            "learner.advantage.sources.sums.type = 'gae': no such choice; it is one of dr_grpo",
        ),
        ("eval.sets.sums.samples=2", "eval.sets.sums: a task of the mixture has that name"),
        ('eval.sets.more.path="x.jsonl"', "eval.sets.more.path: the task reads no file"),
        (
            'task.sources.x.task={ type = "python", path = "x.py", template = "chat" }',
            "template and chat",
        ),
    ],
)
def test_what_a_mixture_cannot_be_is_refused_by_name(setting: str, said: str):
    with pytest.raises(SettingsError, match=said.replace(".", r"\.")):
        mixed("model.type=pretrained", "model.path=x", setting)
