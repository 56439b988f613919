"""Admission: over any interleaving, and over resumptions with and without what Redis held."""

import asyncio
import json
from collections import Counter
from contextlib import nullcontext
from pathlib import Path

import msgspec
import pytest
import redis
from helpers.fixture_types import Buffers, MakeBuffers, MakeGroup, MakeRun
from helpers.policies import new_admission
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.config import Run
from areal_q.errors import BufferFull, RecordError, TaskError
from areal_q.messages import Array, Ticket, decode_ticket, encode
from areal_q.system.run_dir import differences, with_digests
from areal_q.tasks import Problem, build_task, build_tokenizer, columns_for, problem_at
from areal_q.tasks.ordering.pass_rates import DrawnProblem
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from learner import checkpoint
from learner.build import build_admission
from learner.data.admission import Admission, ticket_seed

shared = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


def admission_of(run: Run, buffers: Buffers) -> Admission:
    return new_admission(run, buffers.learner())


def tickets_in(buffers: Buffers) -> list[Ticket]:
    async def claim() -> list[Ticket]:
        async with buffers.worker("reader") as worker:
            return [claim.ticket for claim in await worker.claim(10**6, block_s=0)]

    return asyncio.run(claim())


@settings(shared, max_examples=40)
@given(
    max_lag=st.integers(0, 3),
    oversampling=st.sampled_from([1, 1.5, 2]),
    moves=st.lists(st.tuples(st.sampled_from(["commit", "take", "drop"]), st.integers(1, 9))),
)
def test_no_interleaving_admits_more_than_the_staleness_bound(
    make_run: MakeRun,
    make_group: MakeGroup,
    make_buffers: MakeBuffers,
    max_lag: int,
    oversampling: float,
    moves: list[tuple[str, int]],
):
    """With more groups at once, the bound is that of as many more in the first step."""
    admitted = f"learner.max_lag={max_lag}", f"learner.oversampling={oversampling}"
    run = make_run(*admitted, "learner.groups=4", "learner.minibatches=1")
    size, bound = run.learner.groups, (max_lag + 1) * run.learner.groups * oversampling
    buffers = make_buffers()
    learner = buffers.learner()
    admission = new_admission(run, learner)
    version, dropped, taken, claims = 0, 0, [], []

    async def commit(count: int) -> None:
        async with buffers.worker() as worker:
            claims.extend(await worker.claim(10**6, block_s=0))
            for claim in [claims.pop(0) for _ in range(min(count, len(claims)))]:
                await worker.commit(claim, make_group(claim.ticket))

    admission.admit(version)
    for move, count in moves:
        if move == "commit":
            asyncio.run(commit(count))
        elif move == "drop":
            groups = learner.take(count, timeout_s=0)
            dropped += len(groups)
            for group in groups:
                admission.done(group)
        else:
            taken += learner.take(size - len(taken), timeout_s=0)
            if len(taken) == size:
                version += 1
                for group in taken:
                    admission.done(group)
                taken = []
        admission.admit(version)
        # The formula counts what was dropped as never admitted; equal, since places are refilled at once.
        assert admission.cursor - dropped == version * size + bound
        assert len(admission.outstanding) == bound
        in_buffer = learner.open_tickets() | set(learner.unread())
        assert admission.outstanding == in_buffer | {g.ticket.number for g in taken}


def test_ticket_counts_while_outstanding_and_if_it_comes_back(make_run: MakeRun, buffers: Buffers):
    admission = admission_of(make_run("learner.max_lag=0"), buffers)
    admission.admit(0)
    admission.recount({0, 1})
    assert (admission.outstanding, admission.lost, admission.capacity_left) == ({0, 1}, {2, 3}, 2)
    assert [admission.expects(n) for n in (1, 3, 4)] == [True, True, False]
    assert (admission.outstanding, admission.lost) == ({0, 1, 3}, {2})


def test_lag_0_admits_nothing_before_the_whole_step_is_over(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup
):
    run = make_run("learner.max_lag=0")
    admission = admission_of(run, buffers)
    assert (admission.admit(0), admission.admit(0)) == (4, 0)
    tickets = tickets_in(buffers)
    for done, ticket in enumerate(tickets, start=1):
        assert admission.capacity_left == done - 1
        admission.done(make_group(ticket))
    assert admission.admit(1) == 4
    assert [t.number for t in tickets] == [0, 1, 2, 3]
    assert {t.step for t in tickets} == {0}


def test_admissions_that_found_no_room_are_counted(
    make_run: MakeRun, buffers: Buffers, monkeypatch
):
    def refuse(*args: object) -> None:
        raise BufferFull("no room")

    admission = admission_of(make_run(), buffers)
    with monkeypatch.context() as full:
        full.setattr(LearnerBuffer, "admit", refuse)
        assert [admission.admit(0), admission.admit(0)] == [0, 0]
    assert (admission.refused, admission.cursor, admission.outstanding) == (2, 0, set())
    assert admission.admit(0) > 0


def test_a_ticket_is_a_function_of_the_seed_and_its_number(
    make_run: MakeRun, make_buffers: MakeBuffers
):
    run = make_run("seed=3")
    buffers = make_buffers()
    admission_of(run, buffers).admit(0)
    tickets = tickets_in(buffers)
    buffers = make_buffers()
    admission_of(run, buffers).issue([7, 2], 0)
    again = sorted(tickets_in(buffers), key=lambda t: t.number)
    assert [t for t in tickets if t.number in (7, 2)] == again
    task = build_task(run.task)
    for t in tickets:
        problem = problem_at(task, t.number, 3)
        assert (t.prompt, t.answer) == (problem.prompt, problem.answer)
        assert (
            build_tokenizer(run.model, run.task).decode(t.prompt_ids.numpy().tolist()) == t.prompt
        )
        assert (t.purpose, t.group_size, t.sampling) == ("train", 2, run.rollout.sampling)
    seeds = {ticket_seed(seed, n) for seed in range(20) for n in range(500)}
    assert len(seeds) == 10_000
    assert 2**61 < max(seeds) < 2**62


@pytest.mark.parametrize(
    ("more", "row"),
    [
        ([], {"prompt": "2=", "answer": "2", "level": [1.5]}),
        (["reward.columns=['level']"], {"level": [1.5]}),
        (["reward.columns=[]"], None),
    ],
)
def test_a_row_of_the_data_travels_with_its_ticket(
    make_run: MakeRun,
    buffers: Buffers,
    make_group: MakeGroup,
    tmp_path: Path,
    more: list[str],
    row: object,
):
    (tmp_path / "mine.py").write_text(
        "def problems():\n"
        "    return [{'prompt': f'{n}=', 'answer': '2', 'level': [1.5]} for n in (2, 2, 3)]\n"
    )
    run = make_run("task={type='python', heldout=0.4, path='" + f"{tmp_path}/mine.py'}}", *more)
    admission = admission_of(run, buffers)
    admission.admit(0)
    ticket = decode_ticket(encode(tickets_in(buffers)[0]))
    problem = Problem.of_ticket(ticket)
    assert problem in build_task(run.task, columns_for(run)).train
    assert (json.loads(ticket.columns) if ticket.columns else None) == row
    admission.check(make_group(ticket))
    with pytest.raises(RecordError, match="its ticket is not the one admitted"):
        admission.check(make_group(replace(ticket, columns='{"level": 2}')))


@pytest.mark.parametrize(
    ("environment", "fits"),
    [
        ("{type='single'}", False),
        ("{type='calculator'}", False),
        ("{type='external'}", True),
        ("{type='python', path='mine.py'}", True),
    ],
)
def test_a_group_may_have_an_agents_own_prompt(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, environment: str, fits: bool
):
    """As a worker commits it: instructions and tools stand before what the ticket asks."""
    run = make_run(f"rollout.environment={environment}", "model.max_positions=1024")
    admission = admission_of(run, buffers)
    admission.admit(0)
    ticket = decode_ticket(encode(tickets_in(buffers)[0]))
    ids = ticket.prompt_ids.numpy()
    longer = replace(ticket, prompt_ids=Array.of([*ids, 1, 2, *ids], "int32"))
    with nullcontext() if fits else pytest.raises(RecordError, match="not the one admitted"):
        admission.check(make_group(longer))
    with pytest.raises(RecordError, match="not the one admitted"):
        admission.check(make_group(replace(longer, answer="another")))


def test_evaluation_is_greedy_on_held_out_and_takes_no_place(make_run: MakeRun, buffers: Buffers):
    run = make_run("eval.problems=6")
    admission = admission_of(run, buffers)
    assert admission.evaluate(5) == 6
    assert admission.capacity_left == 12
    tickets, task = tickets_in(buffers), build_task(run.task)
    assert [(t.prompt, t.answer) for t in tickets] == [
        (p.prompt, p.answer) for p in task.heldout[:6]
    ]
    assert {(t.purpose, t.step, t.group_size, t.sampling.temperature) for t in tickets} == {
        ("eval", 5, 1, 0.0)
    }


def test_places_of_tickets_that_came_to_nothing_are_refilled(make_run: MakeRun, buffers: Buffers):
    run = make_run()
    admission = admission_of(run, buffers)
    admission.admit(0)
    admission.recount(set(range(5, 12)))
    assert admission.admit(0) == 5
    assert admission.outstanding == set(range(5, 17))


class History:
    """One learner's life on a real Redis, from a fresh start or a checkpoint, with plain steps."""

    def __init__(self, run: Run, url: str, make_group: MakeGroup, state: checkpoint.State | None):
        self.run, self.url, self.make_group = run, url, make_group
        self.buffer = LearnerBuffer(url, run.name)
        task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
        self.admission = build_admission(run, task, tokenizer, self.buffer, state)
        self.buffer.publish_run("", {})
        self.buffer.checks = [self.admission.check]
        self.version = state.step if state else 0
        self.asked: dict[int, int] = {}

    @property
    def drawn(self) -> dict[int, DrawnProblem]:
        return self.admission.order._pools[""].drawn

    def work(self, count: int) -> None:
        async def commit() -> None:
            worker = WorkerBuffer(self.url, self.run.name, "w", claim_timeout_s=0.01)
            for claim in await worker.claim(count, block_s=0.0):
                await worker.commit(claim, self.make_group(claim.ticket))
            await worker.close()

        asyncio.run(commit())

    def step(self) -> list[int]:
        """Ticket numbers of the B groups that it learns from."""
        self.admission.admit(self.version)
        self.work(6)
        groups = self.buffer.take(self.run.learner.groups, timeout_s=0.0)
        self.asked |= {g.ticket.number: g.ticket.problem for g in groups}
        for group in groups:
            self.admission.done(group)
        self.version += 1
        assert len(groups) == self.run.learner.groups
        return [group.ticket.number for group in groups]

    def state(self) -> checkpoint.State:
        return checkpoint.State(
            step=self.version,
            position=self.buffer.position,
            cursor=self.admission.cursor,
            outstanding=sorted(self.admission.outstanding),
            digests={},
            updates=0,
            skipped=0,
            order=self.admission.order.state(),
        )

    def dies(self) -> None:
        self.buffer.close()


@pytest.mark.parametrize("redis_is", ["there", "lost", "lost between two steps"])
def test_over_a_crash_every_prompt_counts_once(
    make_run: MakeRun, make_group: MakeGroup, redis_url: str, redis_is: str
):
    run = make_run("learner.max_lag=1")
    first = History(run, redis_url, make_group, None)
    kept = first.step() + first.step()
    state = first.state()
    if redis_is != "lost between two steps":
        first.step()  # this one the crash takes away
        first.work(3)
    first.dies()
    if redis_is != "there":
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()

    second = History(run, redis_url, make_group, state)
    bound = (run.learner.max_lag + 1) * run.learner.groups
    for _ in range(6):
        kept += second.step()
        assert len(second.admission.outstanding) <= bound
    second.admission.admit(second.version)
    assert len(second.admission.outstanding) == bound
    second.dies()

    assert max(Counter(kept).values()) == 1
    # Nothing admitted is forgotten: it was used, or still will be.
    assert set(kept) | second.admission.outstanding == set(range(second.admission.cursor))


ONLY_NEW = [
    "learner.order.type=pass-rate",
    *(f"learner.order.{p}=0" for p in ("medium", "hard", "easy")),
]
"""A curriculum that asks no problem twice as long as there are others."""


@pytest.mark.parametrize("redis_is", ["there", "lost"])
def test_over_a_crash_a_ticket_keeps_what_it_drew(
    make_run: MakeRun, make_group: MakeGroup, redis_url: str, redis_is: str
):
    """By a curriculum, which only the checkpoint and the tickets themselves know."""
    run = make_run("learner.max_lag=1", "task.digits=2", *ONLY_NEW)
    first = History(run, redis_url, make_group, None)
    first.step()
    state = msgspec.json.decode(msgspec.json.encode(first.state()), type=checkpoint.State)
    at_checkpoint = {n: d.problem for n, d in first.drawn.items()}
    first.step()
    first.admission.admit(first.version)
    drawn = first.asked | {n: d.problem for n, d in first.drawn.items()}
    first.dies()
    if redis_is == "lost":
        with redis.Redis.from_url(redis_url) as client:
            client.flushall()
        drawn = at_checkpoint

    second = History(run, redis_url, make_group, state)
    assert {n: d.problem for n, d in second.drawn.items()}.items() <= drawn.items()
    assert set(second.drawn) == second.admission.outstanding
    for _ in range(4):
        second.step()

    assert {n: p for n, p in second.asked.items() if n in drawn}.items() <= drawn.items()
    assert second.buffer.quarantined_total() == 0
    asked = first.asked | second.asked
    assert len({*asked.values()}) == len(asked) >= 20
    second.dies()


def test_a_ticket_asks_for_what_it_drew_and_no_other(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup
):
    run = make_run("learner.order.type=pass-rate")
    admission = admission_of(run, buffers)
    admission.admit(0)
    ticket = decode_ticket(encode(tickets_in(buffers)[0]))

    admission.check(make_group(ticket))
    another = replace(ticket, problem=(ticket.problem + 1) % 80)
    with pytest.raises(RecordError, match="its ticket is not the one admitted"):
        admission.check(make_group(another))
    # Of a ticket that an earlier learner admitted, the ticket itself says what it drew.
    admission.done(make_group(ticket))
    admission.check(make_group(ticket))
    for far in (-1, 10**6):
        with pytest.raises(RecordError, match="asks for problem"):
            admission.check(make_group(replace(ticket, problem=far)))


def test_groups_of_an_emptied_redis_with_its_clock_behind_count(
    make_run: MakeRun, make_group: MakeGroup, redis_url: str
):
    """The checkpoint's position is of a clock that was ahead, so that the groups' ids are below it."""
    run = make_run("learner.max_lag=1")
    first = History(run, redis_url, make_group, None)
    first.step()
    state = msgspec.structs.replace(first.state(), position=f"{10**14}-0")
    first.dies()
    with redis.Redis.from_url(redis_url) as client:
        client.flushall()
    second = History(run, redis_url, make_group, state)
    second.admission.admit(second.version)
    second.work(6)
    second.dies()
    third = History(run, redis_url, make_group, state)
    made = third.buffer.unread()
    assert len(made) == 6
    assert third.admission.outstanding >= set(made)
    third.dies()


def test_a_fresh_run_of_the_same_name_forgets_the_earlier_one(
    make_run: MakeRun, make_group: MakeGroup, redis_url: str
):
    run = make_run()
    first = History(run, redis_url, make_group, None)
    first.step()
    first.dies()
    second = History(run, redis_url, make_group, None)
    assert second.step() == [0, 1, 2, 3]
    second.dies()


ORDER = """
import json

def order(number, problems, seed, level):
    \"\"\"The easiest first, for ever.\"\"\"
    places = sorted(range(len(problems)), key=lambda i: json.loads(problems[i].columns)[level])
    return places[number % len(places)]

def far(number, problems, seed):
    return len(problems)

def none(number, problems, seed):
    return number / 2

def raises(number, problems, seed):
    raise KeyError("level")
"""


@pytest.fixture
def leveled(tmp_path: Path) -> list[str]:
    """The settings of a task whose problems have levels, with no reward of one's own."""
    rows = [{"prompt": f"{n}=", "answer": "2", "level": 7 * n % 20} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "mine.py").write_text(ORDER)
    task = f'task={{type="jsonl", path="{tmp_path}/rows.jsonl", heldout=0.1}}'
    return [task, f"learner.order.path={tmp_path}/mine.py"]


def test_an_order_of_ones_own_says_which_problem_is_next(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, leveled: list[str]
):
    run = make_run(*leveled, 'learner.order.settings={level="level"}', "learner.max_lag=9")
    admission = admission_of(run, buffers)
    admission.admit(0)
    tickets = tickets_in(buffers)
    levels = [json.loads(t.columns)["level"] for t in tickets]
    assert len(levels) == 40 and levels[:18] == levels[18:36] == sorted(levels[:18])
    for ticket in tickets:
        admission.check(make_group(ticket))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("far", r"mine.py:\d+: gave 18 for ticket 0 where an index below 18 is due"),
        ("none", r"mine.py:\d+: gave 0.0 for ticket 0"),
        ("raises", r"mine.py:\d+: KeyError: 'level'"),
    ],
)
def test_an_order_that_gives_no_problem_is_named_with_its_line(
    make_run: MakeRun, buffers: Buffers, leveled: list[str], name: str, said: str
):
    run = make_run(leveled[0], f"{leveled[1]}:{name}")
    with pytest.raises(TaskError, match=said):
        admission_of(run, buffers).admit(0)


def test_a_run_keeps_its_order_and_may_change_its_sampler(
    make_run: MakeRun, leveled: list[str], tmp_path: Path
):
    run = with_digests(make_run(*leveled, f"buffer.sampler.path={tmp_path}/mine.py:far"))
    (tmp_path / "mine.py").write_text(ORDER + "# changed\n")
    with pytest.raises(TaskError, match=r"mine.py: it, or what .* began with; put it back$"):
        with_digests(run)
    again = with_digests(run, ["buffer.sampler"])
    assert differences(run, again) == ["buffer.sampler.digest"]
