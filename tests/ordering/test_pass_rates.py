"""The curriculum by pass rates: which pool a problem is in, who is next, and that a crash changes no turn."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.config import PassRate
from areal_q.tasks.ordering.pass_rates import Pools, PoolsState


def pools(size: int = 6, state: PoolsState | None = None, **weights: int) -> Pools:
    cfg = replace(PassRate(medium=1, new=1, hard=1, easy=1), **weights)
    return Pools(cfg, size, 3, state)


def test_every_problem_is_asked_once_before_any_comes_back():
    one = pools(new=1, medium=0, hard=0, easy=0)

    assert sorted(one.draw(n, n).problem for n in range(6)) == list(range(6))


@pytest.mark.parametrize(
    ("rates", "pool", "mean"),
    [
        ([0.0], "hard", 0.0),
        ([0.2], "medium", 0.2),
        ([0.8], "medium", 0.8),
        ([1.0], "easy", 1.0),
        ([0.0, 1.0], "medium", 0.5),
        ([1.0, 0.0, 0.0], "medium", 0.25),
        ([1.0, 0.0, 0.0, 0.0], "hard", 0.125),
        ([None], "new", None),
        ([0.5, None], "medium", 0.5),
    ],
)
def test_a_pool_follows_from_a_moving_average(rates, pool, mean):
    one = pools()
    problem = one.draw(0, 0).problem
    for rate in rates:
        one.done(0, problem, rate)

    state = one.state()
    assert [name for name, waiting in state.pools.items() if waiting == [problem]] == [pool]
    assert state.rates.get(problem, (None,))[0] == mean


def test_pools_take_turns_and_empty_ones_hand_them_on():
    one = pools(size=5)
    first = [one.draw(n, n) for n in range(4)]
    assert [it.why for it in first] == [
        "new: never scored; no medium one waits",
        "new: never scored",
        "new: never scored; no hard one waits",
        "new: never scored; no easy one waits",
    ]
    for number, rate in enumerate((0.5, 0.0, 0.0, 1.0)):
        one.done(number, first[number].problem, rate)

    assert [one.draw(n, n).why for n in range(4, 9)] == [
        "medium: pass rate 0.50 after 1 group",
        "new: never scored",
        "hard: pass rate 0.00 after 1 group",
        "easy: pass rate 1.00 after 1 group",
        "hard: pass rate 0.00 after 1 group; no medium one waits",
    ]
    assert one.draw(9, 9).why == "all problems are being asked"


def test_who_has_waited_the_longest_is_next():
    one = pools(size=3, new=1, medium=0, hard=0, easy=0)
    asked = [one.draw(n, n).problem for n in range(3)]
    for number in (2, 0, 1):
        one.done(number, asked[number], 0.0)

    assert [one.draw(n, n).problem for n in range(3, 6)] == [asked[2], asked[0], asked[1]]


def test_what_a_ticket_drew_stays_with_it():
    one = pools()

    assert one.draw(0, 0) == one.draw(0, 0)
    one.done(0, one.draw(0, 0).problem, 0.5)
    assert 0 not in one.drawn


def test_a_lost_ticket_gives_its_problem_back():
    one = pools(size=2)
    lost, _ = one.draw(0, 0), one.draw(1, 1)
    one.lost([0])

    assert one.draw(2, 2).problem == lost.problem


class Learning:
    """A learner of one curriculum that keeps B tickets open, and a Redis that remembers what they drew."""

    def __init__(self, size: int, open_: int) -> None:
        self.pools, self.open, self.next, self.redis = pools(size), open_, 0, {}
        self.finished: list[int] = []

    def admit(self) -> None:
        while len(set(self.redis) - set(self.finished)) < self.open:
            self.redis[self.next] = self.pools.draw(self.next, self.next)
            self.next += 1

    def finish(self, rate) -> None:
        """Finishes the oldest open ticket."""
        number = min(set(self.redis) - set(self.finished))
        self.pools.done(number, self.redis[number].problem, rate)
        self.finished.append(number)


@settings(max_examples=60)
@given(
    size=st.integers(2, 9),
    open_=st.integers(1, 5),
    rates=st.lists(st.sampled_from([None, 0.0, 0.5, 1.0]), min_size=4, max_size=40),
    data=st.data(),
)
def test_a_crash_at_any_moment_changes_no_choice(size: int, open_: int, rates, data):
    """The learner that goes on has the checkpoint and what Redis holds, and finishes the same groups again."""
    saved_at = data.draw(st.integers(0, len(rates) - 1))
    crashed_at = data.draw(st.integers(saved_at, len(rates) - 1))
    whole, crashed = Learning(size, open_), Learning(size, open_)
    saved, known, finished = b"", {}, list[int]()
    for step, rate in enumerate(rates):
        for one in (whole, crashed):
            one.admit()
        if step == saved_at:
            saved = msgspec.json.encode(crashed.pools.state())
            finished = list(crashed.finished)
        if step == crashed_at:
            known = dict(crashed.redis)
            crashed.pools = pools(size, msgspec.json.decode(saved, type=PoolsState))
            crashed.finished = finished
            for number, drawn in known.items():
                if number not in finished and number not in crashed.pools.drawn:
                    crashed.pools.take_up(number, drawn)
            for again in rates[saved_at:step]:
                crashed.finish(again)
        for one in (whole, crashed):
            one.finish(rate)

    assert crashed.redis == whole.redis
    states = [replace(one.pools.state(), walked=0) for one in (crashed, whole)]
    assert states[0] == states[1]


def test_no_problem_starves_however_the_rates_move():
    one, asked = pools(size=20), [0] * 20
    for number in range(20 * 40):
        problem = one.draw(number, number).problem
        asked[problem] += 1
        one.done(number, problem, (0.0, 0.5, 1.0)[(number // 7 + problem) % 3])

    assert min(asked) > 5
