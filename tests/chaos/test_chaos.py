"""The short form of `make chaos`, and that its judge sees each kind of breach."""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import pytest
import redis
from helpers.weight_sync import publish

from areal_q.config import LearnerConfig
from areal_q.messages import VersionSpan, encode
from areal_q.models import DecoderConfig
from bench.chaos import faults, redis_faults
from bench.chaos.cluster import RUN, Cluster, Notes, cluster
from bench.chaos.foreign_hand import SPOILT, ForeignHand
from bench.chaos.promises import (
    FOREIGN,
    KEYS,
    Follower,
    Left,
    Seen,
    Witness,
    broken,
    growth,
    said_published,
)
from bench.chaos.storm import SCRIPTED, survive
from buffer.logs.step_log import StepRecord
from buffer.redis_store import LearnerBuffer
from buffer.weight_sync import WeightServer
from learner.checkpoint.files import State
from learner.data.validation import fits

MODEL = DecoderConfig(
    family="qwen3", vocab_size=100, width=16, layers=1, heads=2, kv_heads=1, head_dim=8, mlp=16,
    max_positions=32,
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_dozen_faults_break_no_promise():
    outcome = survive(SCRIPTED, seed=5, count=12, gap_s=2.0, faketime=None)
    assert outcome.breaches == []
    assert sum(outcome.faults.values()) == 12
    assert outcome.steps >= len(outcome.rewards) > 3


@pytest.fixture
def sound(make_group, make_ticket) -> tuple[Left, Seen, Notes]:
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
    published = {(version, f"d{version}") for version in range(3)}
    return Left(1, steps, log, state, {5}, {4}, {"4-0"}, [], published), seen, Notes()


def replace(left: Left, **fields) -> Left:
    return Left(**({name: getattr(left, name) for name in left.__dataclass_fields__} | fields))


def test_a_sound_run_breaks_nothing(sound):
    assert list(broken(*sound)) == []


def test_a_group_that_counts_twice_is_seen(sound):
    left, seen, notes = sound
    log = [left.log[0], (1, [*left.log[1][1][:1], left.log[0][1][0]])]
    assert "ticket 0 counted 2 times" in list(broken(replace(left, log=log), seen, notes))


def test_a_committed_group_that_is_nowhere_is_seen(sound):
    left, seen, notes = sound
    found = list(broken(replace(left, unread=set()), seen, notes))
    assert "ticket 4: its group was committed in time, and is lost" in found
    assert "ticket 4 is outstanding and nowhere in Redis" in found


@pytest.mark.parametrize(("version", "lost"), [(0, False), (1, True)])
def test_last_groups_are_too_old_for_the_step_still_to_come(sound, version, lost):
    """Step 2 never ran, but the learner was drawing for it: two versions old is over its bound of one."""
    left, seen, notes = sound
    seen.committed[7] = [VersionSpan(version, 1, f"d{version}")]
    seen.order.append(7)
    found = list(broken(left, seen, notes))
    assert ("ticket 7: its group was committed in time, and is lost" in found) == lost


def test_a_token_over_the_bound_is_seen_also_across_a_fork(sound):
    left, seen, notes = sound
    assert "step 1, ticket 2: a token 1 versions old" not in list(broken(left, seen, notes))
    steps = [left.steps[0], msgspec.structs.replace(left.steps[1], base_digest="other")]
    log = [(1, [*left.log[1][1]])]
    abandoned = [VersionSpan(2, t.num_tokens, "x") for t in log[0][1][0].trajectories]
    trajectories = [
        msgspec.structs.replace(t, spans=[s])
        for t, s in zip(log[0][1][0].trajectories, abandoned, strict=True)
    ]
    log[0][1][0] = msgspec.structs.replace(log[0][1][0], trajectories=trajectories)
    found = list(broken(replace(left, steps=steps, log=log), seen, notes))
    assert "step 1, ticket 2: a token 3 versions old" in found
    assert "step 1 does not begin with the weights that step 0 made" in found


def test_weights_that_were_never_published_are_seen(sound):
    left, seen, notes = sound
    seen.committed[4] = [VersionSpan(2, 5, "altered")]
    found = list(broken(left, seen, notes))
    assert "tokens were drawn by a version 2 (altered) that was never published" in found


def test_a_false_number_of_published_weights_is_seen(sound):
    left, seen, notes = sound
    seen.committed[4] = [VersionSpan(1, 5, "d2")]
    found = list(broken(left, seen, notes))
    assert "tokens were drawn by a version 1 (d2) that was never published" in found


def test_an_announcement_that_was_never_published_is_seen(sound):
    left, seen, notes = sound
    seen.published[("b", 2)] = {"forged"}
    found = list(broken(left, seen, notes))
    assert found == ["version 2 (forged) was announced and is not in the learner's log"]


def test_what_drew_tokens_is_known_though_nobody_heard_it(sound, make_version, tmp_path, caplog):
    """A learner was killed after one worker had fetched a version, before the witness was connected again."""
    left, seen, notes = sound
    caplog.set_level("DEBUG", "buffer.weight_sync.server")
    server = WeightServer("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    abandoned = make_version(2)
    publish(server, abandoned)
    server.close()
    log = tmp_path / "learner.log"
    log.write_text(caplog.text)
    seen.committed[4] = [VersionSpan(2, 5, abandoned.manifest.digest)]
    assert len(list(broken(left, seen, notes))) == 1
    known = replace(left, published=left.published | said_published(log))
    assert list(broken(known, seen, notes)) == []


def test_a_sound_group_in_the_quarantine_is_seen(sound):
    left, seen, notes = sound
    entry = {b"source": KEYS.groups.encode(), b"record": encode(left.log[0][1][0])}
    poison = entry | {b"record": b"\xc1"}
    found = list(broken(replace(left, quarantine=[poison, entry]), seen, notes))
    assert found == ["ticket 0: a sound group in the quarantine"]


def test_growth_is_that_of_the_process_that_lived_longest():
    samples = [(60.0 * i, 7 if i < 4 else 8, 10**6 * i, i) for i in range(24)]
    found = growth("learner", samples)
    assert found and found.minutes == 19
    assert found.resident_mb == (11.0, 21.0)
    assert growth("learner", samples[:5]) is None
    assert found.flat and not msgspec.structs.replace(found, resident_mb=(11.0, 33.0)).flat
    assert not msgspec.structs.replace(found, files=(5.0, 22.0)).flat


def test_groups_that_redis_lost_when_emptied_are_not_missed(sound):
    left, seen, notes = sound
    emptied = replace(left, unread=set(), open=set())
    assert len(list(broken(emptied, seen, notes))) == 3
    assert list(broken(emptied, seen, Notes(flushed={4, 5}))) == []
    log = [left.log[0], (1, [*left.log[1][1][:1], left.log[0][1][0]])]
    found = list(broken(replace(left, log=log), seen, Notes(flushed={0})))
    assert "ticket 0 counted 2 times" in found


def test_a_group_of_another_run_that_was_learnt_from_is_seen(sound):
    left, seen, notes = sound
    state = msgspec.structs.replace(left.state, run_id="a")
    found = list(broken(replace(left, state=state), seen, notes))
    assert "step 1, ticket 3: a group of run without an id" in found


def test_foreign_commit_that_was_learnt_from_is_seen(sound):
    left, seen, notes = sound
    step, [first, second] = left.log[1]
    forged = msgspec.structs.replace(second, worker=FOREIGN)
    found = list(broken(replace(left, log=[left.log[0], (step, [first, forged])]), seen, notes))
    assert found == ["step 1, ticket 3: what a foreign hand committed was learnt from"]


def test_what_is_spoilt_and_not_set_aside_is_seen(sound):
    left, seen, _ = sound
    notes = Notes(spent={4, 5}, spoiled={"4-0": "too long", "7-0": "too long"})
    missing = "group 7-0, too long: neither in the quarantine nor still to come"
    assert list(broken(left, seen, notes)) == [missing]
    entry = {b"source": KEYS.groups.encode(), b"id": b"7-0", b"record": b"\xc1"}
    assert list(broken(replace(left, quarantine=[entry]), seen, notes)) == []
    seen.set_aside.add("7-0")
    assert list(broken(left, seen, notes)) == []


def test_a_ticket_that_a_foreign_hand_spent_is_not_missed(sound):
    left, seen, notes = sound
    spent = replace(left, open=set())
    assert list(broken(spent, seen, notes)) == ["ticket 5 is outstanding and nowhere in Redis"]
    assert list(broken(spent, seen, Notes(spent={5}))) == []


def test_what_a_foreign_hand_began_is_excused_and_no_more(sound):
    left, seen, notes = sound
    seen.committed[4] = [VersionSpan(2, 5, "a")]
    spent = replace(left, unread=set())
    assert len(list(broken(spent, seen, notes))) == 2
    assert list(broken(spent, seen, Notes(spent={4}))) == []
    log = [left.log[0], (1, [*left.log[1][1][:1], left.log[0][1][0]])]
    found = list(broken(replace(left, log=log), seen, Notes(spent={0})))
    assert "ticket 0 counted 2 times" in found


def test_a_group_that_was_taken_away_must_be_in_the_quarantine(sound, make_group, make_ticket):
    left, seen, _ = sound
    notes, away = Notes(moved={4}), replace(left, unread=set())
    assert "ticket 4 is outstanding and nowhere in Redis" in list(broken(away, seen, notes))
    entry = {b"source": KEYS.groups.encode(), b"record": encode(make_group(make_ticket(4)))}
    assert list(broken(replace(away, quarantine=[entry]), seen, notes)) == []


def test_what_a_fault_itself_saw_is_among_the_breaches(sound):
    left, seen, _ = sound
    notes = Notes(breaches=["a second learner was not refused: 0, []"])
    assert list(broken(left, seen, notes)) == notes.breaches


def test_a_stream_is_read_anew_where_redis_forgot_it(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        follower = Follower(client, "s")
        for entry in ("5-0", "6-0"):
            client.xadd("s", {"a": "b"}, id=entry)
        assert [entry for entry, _ in follower.read()] == ["5-0", "6-0"]
        client.flushall()
        client.xadd("s", {"a": "b"}, id="2-0")
        assert [entry for entry, _ in follower.read()] == ["2-0"]
        assert follower.read() == []


@pytest.fixture
def with_redis(redis_url) -> Iterator[Cluster]:
    """A cluster of which Redis alone runs."""
    with cluster(SCRIPTED, faketime=None, namespaces=False) as made:
        made.services = {"redis": made.services["redis"]}
        answers(made)
        yield made


def answers(made: Cluster) -> None:
    while True:
        made.tend()
        with suppress(redis.ConnectionError), made.client() as client:
            client.ping()
            return


@pytest.mark.parametrize("late", [0, 3])
def test_a_replica_takes_over_with_all_but_the_last_writes(
    with_redis, make_ticket, make_group, monkeypatch, late
):
    """Tickets 0 and 1 were there, 1 is answered and 2 comes when nobody follows any more."""
    with with_redis.client() as client:

        def late_writes(seconds: float) -> None:
            """Stands for the writes of half a second."""
            if late:
                client.xdel(KEYS.tickets, entries[1])
                client.xadd(KEYS.groups, {"record": encode(make_group(make_ticket(1)))})
                client.xadd(KEYS.tickets, {"record": encode(make_ticket(2))})

        entries = [client.xadd(KEYS.tickets, {"record": encode(make_ticket(n))}) for n in range(2)]
        monkeypatch.setattr(redis_faults, "lose_writes", late_writes)
        before = client.info()["run_id"]
        redis_faults.take_over(with_redis, random.Random(0))
        answers(with_redis)
        assert client.info()["run_id"] != before
        assert [entry for entry, _ in client.xrange(KEYS.tickets)] == entries
    notes = with_redis.notes
    assert (notes.flushed, notes.moved) == (({2}, {1}) if late else (set(), set()))


def test_all_that_lies_or_forges_is_among_the_faults(with_redis):
    names = {fault.name for fault in faults.faults(with_redis)}
    assert {f"foreign hand: {kind}" for kind in ForeignHand.KINDS} < names
    assert {"relay that lies", "publisher that lies to the relay", "replica takes over"} < names


def test_a_judge_looks_for_a_moved_group_where_it_is(sound, with_redis, make_group, make_ticket):
    """Its turn comes later, and what a foreign hand forged of it is nobody's."""
    witness = Witness(with_redis)
    groups = [make_group(make_ticket(n)) for n in range(3)]
    forged = encode(make_group(make_ticket(7)))
    with_redis.notes.forged.add(forged)
    with_redis.notes.moved.add(0)
    with with_redis.client() as client:
        for record in (*map(encode, groups), forged, encode(groups[1]), encode(groups[0])):
            client.xadd(KEYS.groups, {"record": record})
        while witness.seen.order != [1, 2, 0]:
            time.sleep(0.01)
    witness.stop()
    assert set(witness.seen.committed) == {0, 1, 2}


@pytest.mark.parametrize(
    ("script", "refused"),
    [
        ("import sys; print('this is refused'); sys.exit(2)", True),
        ("import sys; print('out of memory'); sys.exit(2)", False),
        ("print('this is refused')", False),
        ("import time; time.sleep(60)", False),
    ],
)
def test_a_second_learner_must_be_refused_in_these_words(tmp_path, monkeypatch, script, refused):
    command = [sys.executable, "-c", script]
    monkeypatch.setattr(faults, "REFUSED_S", 60.0 if "sleep" not in script else 0.5)
    monkeypatch.setattr(Cluster, "learner", lambda self, root: command)
    made = Cluster(tmp_path, "127.0.0.1", {}, {}, None, {}, {})
    faults._refused(made, tmp_path, "this is refused")
    assert (made.notes.breaches == []) == refused


@pytest.mark.parametrize("kind", SPOILT)
def test_what_the_foreign_hand_commits_cannot_be_learnt_from(
    kind, redis_url, make_group, make_ticket
):
    """Each kind goes to the quarantine of a learner of such a model, and a sound group does not."""
    learner = LearnerBuffer(redis_url, RUN)
    learner.run_id = "a"
    learner.checks = [fits(MODEL, LearnerConfig())]
    sound = make_group(make_ticket(1, run_id="a"), worker=FOREIGN)
    with redis.Redis.from_url(redis_url) as client:
        for group in (sound, SPOILT[kind](sound)):
            client.xadd(KEYS.groups, {"record": encode(group)})
        assert [group.ticket.number for group in learner.take(2, 0.0)] == [1]
        assert learner.quarantined_total() == 1
    learner.close()


@pytest.mark.parametrize(("digest", "lost"), [("d2", True), ("abandoned", False)])
def test_a_group_of_an_abandoned_history_is_not_missed(sound, digest, lost):
    """A resumed learner whose bits differ drops what the history before drew; what its own drew it may not."""
    left, seen, notes = sound
    steps = [left.steps[0], msgspec.structs.replace(left.steps[1], fork=1)]
    seen.committed[7] = [VersionSpan(2, 1, digest)]
    seen.order.append(7)
    seen.published[("b", 2)] = {"abandoned"}
    published = left.published | {(2, "abandoned")}
    found = list(broken(replace(left, steps=steps, published=published), seen, notes))
    assert ("ticket 7: its group was committed in time, and is lost" in found) == lost
    assert len(found) == lost
