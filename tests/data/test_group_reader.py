"""What the learner takes: nothing too old, nothing twice, and no starving on what went bad."""

import asyncio
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from helpers.fixture_types import Buffers, MakeBuffers, MakeGroup, MakeRun
from helpers.policies import build_group_reader, new_admission

from areal_q.config import Run
from areal_q.errors import TaskError
from areal_q.messages import Group, Ticket, VersionSpan
from buffer.sampling.replay_pool import SampledGroups
from learner.data import group_reader as group_reader_module
from learner.data.group_reader import WhileWaiting
from learner.data.staleness import VersionHistory


def drawn_by(group: Group, *versions: int) -> Group:
    """`group` with its last response's last tokens drawn by `versions`, all before by version 9."""

    def spans(tokens: int) -> list[VersionSpan]:
        tail = [VersionSpan(v, 1, f"d{v}") for v in versions]
        return [VersionSpan(9, tokens - len(tail), "d9"), *tail]

    *others, last = group.trajectories
    fresh = [msgspec.structs.replace(t, spans=[VersionSpan(9, t.num_tokens, "d9")]) for t in others]
    last = msgspec.structs.replace(last, spans=spans(last.num_tokens))
    return msgspec.structs.replace(group, trajectories=[*fresh, last])


class Learner:
    """The learner's side at version 9 with a bound of 2, B = 4, over a real buffer."""

    def __init__(self, run: Run, make_group: MakeGroup, buffers: Buffers) -> None:
        self.buffers, self.make_group = buffers, make_group
        self.buffer = buffers.learner()
        self.admission = new_admission(run, self.buffer)
        self.history = VersionHistory(keep=run.learner.versions_kept, forks=[5])
        for version in range(6, 10):
            self.history.add(version, f"d{version}")
        self.group_reader = build_group_reader(run, self.buffer, self.admission, self.history)
        self.stop = threading.Event()

    def answer(self, count: int, *versions: int) -> list[int]:
        """Commits groups for the oldest `count` tickets; returns the tickets' numbers."""

        async def commit() -> list[int]:
            async with self.buffers.worker() as worker:
                claims = await worker.claim(count, block_s=0.0)
                for claim in claims:
                    await worker.commit(claim, drawn_by(self.make_group(claim.ticket), *versions))
            return [claim.ticket.number for claim in claims]

        return asyncio.run(commit())

    def take(self) -> list[int] | None:
        taken = self.group_reader.take(9, self.stop)
        return None if taken is None else [group.ticket.number for group in taken.groups]


@pytest.fixture
def learner(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> Learner:
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    learner = Learner(make_run("learner.max_lag=2", "learner.groups=4"), make_group, buffers)
    learner.admission.admit(9)
    return learner


@pytest.mark.parametrize(("digest", "dropped"), [("d10", 0), ("other", 4)])
def test_resumed_learner_knows_its_version_before_judging_groups(
    learner: Learner, digest: str, dropped: int
):
    """Version 10 is still on its way out when groups are read that the abandoned history drew by its own 10."""
    abandoned = learner.answer(4, 10)
    later = learner.answer(4, 9)

    class Publishing(WhileWaiting):
        def wait_until_out(self) -> None:
            learner.history.add(10, digest)

    taken = learner.group_reader.take(10, learner.stop, Publishing())
    assert taken
    assert [g.ticket.number for g in taken.groups] == (later if dropped else abandoned)
    assert learner.group_reader.dropped == dropped


def test_a_group_goes_when_a_single_token_of_it_is_too_old(learner: Learner):
    fresh = learner.answer(1)
    stale = learner.answer(2, 6)
    fresh += learner.answer(2, 7)
    stale += learner.answer(1, 8, 6)
    fresh += learner.answer(1, 8)
    assert learner.take() == fresh
    assert learner.group_reader.dropped == len(stale) == 3
    # The places of the dropped ones were refilled: 12 were admitted, 3 more now.
    assert learner.admission.cursor == 15
    assert not learner.admission.outstanding & set(stale)


def test_of_more_groups_than_steps_use_the_old_ones_are_dropped(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
):
    """Sixteen drawn at once by version 9: at 10 they may still be used, at 11 those that are left may not."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)
    settings = "learner.max_lag=1", "learner.groups=4", "learner.oversampling=2"
    learner = Learner(make_run(*settings), make_group, buffers)
    learner.admission.admit(9)
    learner.answer(16, 9)
    for version in (9, 10):
        taken = learner.group_reader.take(version, learner.stop)
        assert taken and {learner.group_reader.lag(g, version) for g in taken.groups} == {
            version - 9
        }
        learner.group_reader.consumed()
        learner.history.add(version + 1, f"d{version + 1}")
    threading.Timer(0.5, learner.stop.set).start()
    assert learner.group_reader.take(11, learner.stop) is None
    assert (learner.group_reader.groups, learner.group_reader.dropped) == (16, 8)
    assert learner.admission.outstanding == set(range(16, 32))


def test_group_of_a_finished_ticket_is_counted_and_passed_over(learner: Learner):
    learner.admission.outstanding -= {0, 2}
    learner.answer(6)
    assert learner.take() == [1, 3, 4, 5]
    assert (learner.group_reader.duplicates, learner.group_reader.dropped) == (2, 0)


def test_weights_of_another_history_are_as_old_as_their_way(
    learner: Learner, make_group: MakeGroup
):
    learner.answer(4)
    group = drawn_by(make_group(), 9)
    foreign = msgspec.structs.replace(
        group.trajectories[0], spans=[VersionSpan(9, group.trajectories[0].num_tokens, "other")]
    )
    group = msgspec.structs.replace(group, trajectories=[foreign, *group.trajectories[1:]])
    assert learner.group_reader.lag(group, 9) > 2


def test_totals_count_what_a_resumed_learner_reads_again_once(learner: Learner):
    learner.answer(4)
    learner.take()
    reader, name = learner.group_reader, "buffer/responses"
    read = reader.totals()[name]
    assert read == reader.unfinished_totals()[name] > 0
    reader.consumed()
    assert (reader.totals()[name], reader.unfinished_totals()[name]) == (read, 0)


def test_the_position_is_that_of_the_last_step_that_is_over(learner: Learner):
    learner.answer(12)
    start = learner.group_reader.position
    first = learner.take()
    assert learner.group_reader.position == start
    learner.group_reader.consumed()
    after_one = learner.group_reader.position
    second = learner.take()
    assert learner.group_reader.position == after_one
    assert after_one != start

    # A learner that dies now resumes there, and takes the same groups again.
    again = learner.buffers.learner()
    again.position = after_one
    assert [g.ticket.number for g in again.take(4, timeout_s=0)] == second
    assert not set(first or []) & set(second or [])


def test_places_become_free_only_when_the_step_is_over(learner: Learner):
    learner.answer(12)
    taken = learner.take()
    assert learner.admission.outstanding == set(range(12))
    learner.group_reader.consumed()
    assert learner.admission.outstanding == set(range(12)) - set(taken or [])
    learner.group_reader.consumed()
    assert len(learner.admission.outstanding) == 8


def test_a_stop_while_waiting_takes_nothing_and_loses_nothing(learner: Learner):
    learner.answer(3)
    threading.Timer(0.05, learner.stop.set).start()
    assert learner.take() is None
    assert learner.admission.outstanding == set(range(12))
    again = learner.buffers.learner()
    again.position = learner.group_reader.position
    assert len(again.take(4, timeout_s=0)) == 3


@pytest.fixture
def worker_thread(learner: Learner) -> Iterator[None]:
    """Answers every ticket, forever."""
    over = threading.Event()

    def work() -> None:
        while not over.wait(0.005):
            learner.answer(12)

    thread = threading.Thread(target=work)
    thread.start()
    yield
    over.set()
    thread.join()


def poison_tickets(learner: Learner) -> None:
    learner.buffers.empty("tickets")
    learner.buffers.poison("tickets", 12)
    assert learner.answer(12) == []  # the worker that meets them sets them aside


def poison_groups(learner: Learner) -> None:
    learner.answer(12)
    learner.buffers.empty("groups")
    learner.buffers.poison("groups", 12)


def fall_silent(learner: Learner) -> None:
    """Every worker that takes a ticket dies."""

    async def die() -> None:
        for life in range(7):
            async with learner.buffers.worker(f"w{life}", claim_timeout_s=0.0) as worker:
                await worker.claim(12, block_s=0.0)

    asyncio.run(die())


@pytest.mark.parametrize("poison", [poison_tickets, poison_groups, fall_silent])
def test_poison_does_not_starve_the_learner(
    learner: Learner, poison: Callable[[Learner], None], request: pytest.FixtureRequest
):
    poison(learner)
    request.getfixturevalue("worker_thread")
    assert learner.take() == [12, 13, 14, 15]
    assert learner.buffer.quarantined_total() == 12
    learner.group_reader.consumed()
    assert len(learner.admission.outstanding) <= 12


def test_groups_of_equal_rewards_are_dropped_and_refilled(
    make_run: MakeRun,
    make_buffers: MakeBuffers,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)

    def uneven(ticket: Ticket) -> Group:
        """Tickets 0, 2, 3 and every tenth have equal rewards, for all of them failed and count as 0."""
        group = make_group(ticket)
        if ticket.number in (0, 2, 3) or ticket.number % 10 == 0:
            failed = {"reward": 0.0, "reward_parts": {"error": 1.0}}
            same = [msgspec.structs.replace(t, **failed) for t in group.trajectories]
            return msgspec.structs.replace(group, trajectories=same)
        return group

    settings = ("learner.max_lag=2", "learner.groups=4")
    keeping = Learner(make_run(*settings), uneven, make_buffers())
    keeping.admission.admit(9)
    keeping.answer(12, 9)
    assert keeping.take() == [0, 1, 2, 3]
    assert (keeping.group_reader.uniform, keeping.group_reader.failures.errors) == (0, 3 * 2)

    dropping = Learner(make_run(*settings, "learner.drop_uniform=true"), uneven, make_buffers())
    dropping.admission.admit(9)
    dropping.answer(12, 9)
    assert dropping.take() == [1, 4, 5, 6]
    assert (dropping.group_reader.uniform, dropping.group_reader.dropped) == (3, 0)
    assert dropping.group_reader.failures.errors == 3 * 2
    # 12 were admitted; the 3 dropped ones made room for 3 more, which nobody had to wait for.
    assert dropping.admission.cursor == 15
    assert dropping.admission.outstanding == set(range(15)) - {0, 2, 3}
    dropping.group_reader.consumed()
    assert dropping.take() == [7, 8, 9, 11]
    assert dropping.group_reader.uniform == 4


def failing(group: Group, *indexes: int) -> Group:
    """`group` with these responses' rewards timed out."""
    return msgspec.structs.replace(
        group,
        trajectories=[
            msgspec.structs.replace(t, valid=False, failure="timeout", reward=0.0)
            if t.index in indexes
            else t
            for t in group.trajectories
        ],
    )


@pytest.mark.parametrize(
    ("advantage", "taken"),
    [("grpo", [1, 4, 5, 6]), ("rloo", [1, 4, 5, 6]), ("reinforce++", [1, 2, 4, 5])],
)
def test_groups_with_too_few_scores_are_refilled(
    make_run: MakeRun,
    buffers: Buffers,
    make_group: MakeGroup,
    monkeypatch: pytest.MonkeyPatch,
    advantage: str,
    taken: list[int],
):
    """Tickets 0 and 3 have no score at all; ticket 2 has one, which serves only where the batch is the
    baseline."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)

    def some(ticket: Ticket) -> Group:
        lost = {0: (0, 1, 2), 3: (0, 1, 2), 2: (0, 2), 5: (1,)}
        return failing(make_group(ticket), *lost.get(ticket.number, ()))

    run = make_run(
        "learner.max_lag=2",
        "learner.groups=4",
        "learner.group_size=3",
        f"learner.advantage.type={advantage}",
    )
    learner = Learner(run, some, buffers)
    learner.admission.admit(9)
    learner.answer(12, 9)
    assert learner.take() == taken
    dropped = {0, 3} if 2 in taken else {0, 2, 3}
    assert learner.group_reader.invalid == len(dropped)
    assert learner.admission.outstanding == set(range(12 + len(dropped))) - dropped
    counts = learner.group_reader.failures.metrics()
    read = max(taken) + 1
    assert counts["buffer/responses"] == 3 * read
    assert counts["buffer/invalid/timeout"] == counts["buffer/reward_errors"] == 9
    assert counts["buffer/invalid/exception"] == 0


def test_uniform_groups_are_judged_by_valid_scores(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, monkeypatch: pytest.MonkeyPatch
):
    """Ticket 1's valid rewards are equal; its failed response's 0 must not make it look informative."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)

    def some(ticket: Ticket) -> Group:
        group = make_group(ticket)
        if ticket.number != 1:
            return group
        same = [msgspec.structs.replace(t, reward=1.0) for t in group.trajectories]
        return failing(msgspec.structs.replace(group, trajectories=same), 2)

    sizes = ("learner.max_lag=2", "learner.groups=4", "learner.group_size=3")
    learner = Learner(make_run(*sizes, "learner.drop_uniform=true"), some, buffers)
    learner.admission.admit(9)
    learner.answer(12, 9)
    assert learner.take() == [0, 2, 3, 4]
    assert (learner.group_reader.uniform, learner.group_reader.invalid) == (1, 0)


def test_a_reward_that_fails_for_two_whole_steps_ends_the_run(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, make_ticket
):
    learner = Learner(make_run("learner.groups=40", "learner.group_size=8"), make_group, buffers)
    failures = learner.group_reader.failures
    group = failing(make_group(make_ticket(0, group_size=8)), *range(8))
    for _ in range(2 * 40 - 1):
        failures.add(group)
    with pytest.raises(TaskError, match="all of the first 640 responses"):
        failures.add(group)


class Resumed(Learner, WhileWaiting):
    """A learner over the buffer of one that has ended; it answers 4 more tickets whenever it waits."""

    def __init__(self, ended: Learner, run: Run, make_group: MakeGroup) -> None:
        super().__init__(run, make_group, ended.buffers)
        self.admission.cursor = ended.admission.cursor
        self.admission.outstanding |= set(range(self.admission.cursor))

    def record_episodes(self, step: int) -> None:
        self.answer(4, 9)

    def learn(self) -> SampledGroups | None:
        return self.group_reader.take(9, self.stop, self)


@pytest.mark.parametrize("mended", [True, False])
def test_a_resumed_run_judges_the_reward_anew(
    make_run: MakeRun, buffers: Buffers, make_group: MakeGroup, monkeypatch, mended: bool
):
    """What a reward that failed left in the buffer goes; if it still fails, as many more end the run."""
    monkeypatch.setattr(group_reader_module, "POLL_S", 0.01)

    def broken(ticket: Ticket) -> Group:
        return failing(make_group(ticket), *range(ticket.group_size))

    run = make_run("learner.max_lag=31", "learner.groups=4", "learner.group_size=2")
    ended = Learner(run, broken, buffers)
    ended.admission.admit(9)
    ended.answer(128, 9)
    with pytest.raises(TaskError, match="all of the first 256 responses"):
        ended.take()
    resumed = Resumed(ended, run, make_group if mended else broken)
    if mended:
        assert resumed.learn() and resumed.group_reader.invalid == 128
    else:
        with pytest.raises(TaskError, match="all of the first 512 responses"):
            resumed.learn()
