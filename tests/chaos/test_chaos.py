"""The short form of `make chaos`, and that its judge sees each kind of breach."""

import msgspec
import pytest

from areal_q.messages import VersionSpan, encode
from bench.chaos.promises import KEYS, Left, Seen, broken, growth
from bench.chaos.storm import SCRIPTED, survive
from buffer.logs.step_log import StepRecord
from learner.checkpoint.files import State


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_dozen_faults_break_no_promise():
    outcome = survive(SCRIPTED, seed=5, count=12, gap_s=2.0, faketime=None)
    assert outcome.breaches == []
    assert sum(outcome.faults.values()) == 12
    assert outcome.steps == len(outcome.rewards) > 3


@pytest.fixture
def sound(make_group, make_ticket) -> tuple[Left, Seen]:
    """Two steps of two groups, drawn by the versions that learnt from them; two more are still to come."""

    def answer(number: int, version: int):
        group = make_group(make_ticket(number))
        spans = [[VersionSpan(version, t.num_tokens, f"d{version}")] for t in group.trajectories]
        trajectories = [
            msgspec.structs.replace(t, spans=s)
            for t, s in zip(group.trajectories, spans, strict=True)
        ]
        return msgspec.structs.replace(group, trajectories=trajectories)

    log = [(step, [answer(2 * step + i, step) for i in range(2)]) for step in range(2)]
    common = {"seeds": [], "fork": 0, "settings": "", "machine": "", "metrics": {}}
    steps = [
        StepRecord(
            step=step,
            tickets=[g.ticket.number for g in taken],
            base_digest=f"d{step}",
            digest=f"d{step + 1}",
            **common,
        )
        for step, taken in log
    ]
    state = State(
        step=2, position="0-0", cursor=6, outstanding=[4, 5], digests={}, updates=0, skipped=0
    )
    seen = Seen()
    for group in [g for _, taken in log for g in taken] + [answer(4, 2)]:
        seen.committed[group.ticket.number] = [s for t in group.trajectories for s in t.spans]
        seen.order.append(group.ticket.number)
    seen.published = {("a", version): {f"d{version}"} for version in range(3)}
    return Left(1, steps, log, state, {5}, {4}, []), seen


def replace(left: Left, **fields) -> Left:
    return Left(**({name: getattr(left, name) for name in left.__dataclass_fields__} | fields))


def test_a_sound_run_breaks_nothing(sound):
    assert list(broken(*sound)) == []


def test_a_group_that_counts_twice_is_seen(sound):
    left, seen = sound
    log = [left.log[0], (1, [*left.log[1][1][:1], left.log[0][1][0]])]
    assert "ticket 0 counted 2 times" in list(broken(replace(left, log=log), seen))


def test_a_committed_group_that_is_nowhere_is_seen(sound):
    left, seen = sound
    found = list(broken(replace(left, unread=set()), seen))
    assert "ticket 4: its group was committed in time, and is lost" in found
    assert "ticket 4 is outstanding and nowhere in Redis" in found


@pytest.mark.parametrize(("version", "lost"), [(0, False), (1, True)])
def test_the_last_groups_are_too_old_for_the_step_that_was_still_to_come(sound, version, lost):
    """Step 2 never ran, but the learner was drawing for it: two versions old is over its bound of one."""
    left, seen = sound
    seen.committed[7] = [VersionSpan(version, 1, f"d{version}")]
    seen.order.append(7)
    found = list(broken(left, seen))
    assert ("ticket 7: its group was committed in time, and is lost" in found) == lost


def test_a_token_over_the_bound_is_seen_also_across_a_fork(sound):
    left, seen = sound
    assert "step 1, ticket 2: a token 1 versions old" not in list(broken(left, seen))
    steps = [left.steps[0], msgspec.structs.replace(left.steps[1], base_digest="other")]
    log = [(1, [*left.log[1][1]])]
    abandoned = [VersionSpan(2, t.num_tokens, "x") for t in log[0][1][0].trajectories]
    trajectories = [
        msgspec.structs.replace(t, spans=[s])
        for t, s in zip(log[0][1][0].trajectories, abandoned, strict=True)
    ]
    log[0][1][0] = msgspec.structs.replace(log[0][1][0], trajectories=trajectories)
    found = list(broken(replace(left, steps=steps, log=log), seen))
    assert "step 1, ticket 2: a token 3 versions old" in found
    assert "step 1 does not begin with the weights that step 0 made" in found


def test_weights_that_were_never_published_are_seen(sound):
    left, seen = sound
    seen.committed[4] = [VersionSpan(2, 5, "altered")]
    found = list(broken(left, seen))
    assert "tokens were drawn by a version 2 (altered) that was never published" in found


def test_a_sound_group_in_the_quarantine_is_seen(sound):
    left, seen = sound
    entry = {b"source": KEYS.groups.encode(), b"record": encode(left.log[0][1][0])}
    poison = entry | {b"record": b"\xc1"}
    found = list(broken(replace(left, quarantine=[poison, entry]), seen))
    assert found == ["ticket 0: a sound group in the quarantine"]


def test_growth_is_that_of_the_process_that_lived_longest():
    samples = [(60.0 * i, 7 if i < 4 else 8, 10**6 * i, i) for i in range(24)]
    found = growth("learner", samples)
    assert found and found.minutes == 19
    assert found.resident_mb == (11.0, 21.0)
    assert growth("learner", samples[:5]) is None
    assert found.flat and not msgspec.structs.replace(found, resident_mb=(11.0, 33.0)).flat
    assert not msgspec.structs.replace(found, files=(5.0, 22.0)).flat
