"""The buffer's contract, over each kind of server."""

import asyncio
import random
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from helpers.commands import stretched
from helpers.fixture_types import Buffers
from msgspec.structs import replace

from areal_q.errors import RecordError
from areal_q.messages import (
    Array,
    PartialGroup,
    PartialResponse,
    VersionSpan,
    WorkerStatus,
    encode,
)
from bench.records import make_beat, make_trajectory
from buffer.interface import START, Claim
from buffer.redis_store import WorkerBuffer


@pytest.fixture(params=["redis 6.2", "redis 7", "valkey 9"])
def buffers(request: pytest.FixtureRequest, servers: Callable[[str], str]) -> Iterator[Buffers]:
    made = Buffers(servers(request.param))
    yield made
    made.close()


def numbers(items) -> list[int]:
    return [i.ticket.number for i in items]


async def commit_all(worker: WorkerBuffer, make_group: Callable, count: int = 100) -> list[Claim]:
    claims = await worker.claim(count, block_s=0.0)
    for claim in claims:
        assert await worker.commit(claim, make_group(claim.ticket))
    return claims


async def test_what_a_worker_commits_is_what_the_learner_takes(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    async with buffers.worker() as worker:
        await commit_all(worker, make_group)
    assert learner.take(3, timeout_s=0.0) == [make_group(make_ticket(n)) for n in range(3)]
    assert not learner.rewind()  # nothing was lost


def test_a_group_commits_once_however_many_workers_race(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(40)], cursor=40)

    async def race(name: str) -> int:
        # A claim timeout of almost nothing makes every ticket pass from hand to hand.
        async with buffers.worker(name, claim_timeout_s=0.002) as worker:
            won, chance = 0, random.Random(name)
            worker.max_deliveries = 10**6
            while learner_left():
                claims = await worker.claim(7, block_s=0.0)
                await asyncio.sleep(chance.choice((0, 0.004)))
                for claim in claims:
                    won += await worker.commit(claim, make_group(claim.ticket, worker=name))
            return won

    def learner_left() -> bool:
        return bool(learner.open_tickets())

    async def main():
        return await asyncio.gather(*(race(f"w{i}") for i in range(4)))

    assert sum(asyncio.run(main())) == 40
    assert sorted(numbers(learner.take(100, timeout_s=0.0))) == list(range(40))


def test_the_second_commit_of_a_claim_is_refused(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)

    async def work():
        async with buffers.worker() as worker:
            [claim] = await worker.claim(1, 0.0)
            group = make_group(claim.ticket)
            return await worker.commit(claim, group), await worker.commit(claim, group)

    assert asyncio.run(work()) == (True, False)
    assert learner.unread() == [0]


async def test_an_abandoned_ticket_passes_on_its_owner_is_refused(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    async with buffers.worker("slow") as slow, buffers.worker("heir", 0.05) as heir:
        [old] = await slow.claim(1, 0.0)
        [new] = await heir.claim(1, block_s=5.0)
        assert new.ticket == old.ticket
        assert await slow.renew([old]) == [old]
        assert not await slow.commit(old, make_group(old.ticket, worker="slow"))
        assert await heir.commit(new, make_group(new.ticket, worker="heir"))
    assert [g.worker for g in learner.take(9, 0.0)] == ["heir"]


async def test_a_renewed_ticket_stays_with_its_worker(buffers, make_ticket):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    timeout_s = stretched(0.3)
    async with buffers.worker("long") as long, buffers.worker("other", timeout_s) as other:
        claims = await long.claim(1, 0.0)
        for _ in range(8):
            await asyncio.sleep(timeout_s / 6)
            assert await long.renew(claims) == []
            assert await other.claim(1, 0.0) == []


async def test_tickets_admitted_again_become_one_group_each(
    buffers, make_ticket, make_group, monkeypatch
):
    monkeypatch.setattr("buffer.redis_store.streams.READ_PAGE", 3)
    learner = buffers.learner()
    steps = [5, 5, 2, 5, 6]
    learner.admit([make_ticket(n, step=step) for n, step in enumerate(steps)], cursor=5)
    async with buffers.worker("old") as old, buffers.worker("new") as new:
        [done, held] = await old.claim(2, block_s=0.0)
        assert await old.commit(done, make_group(done.ticket))
        assert learner.readmit(2) == 3
        assert learner.readmit(2) == 0
        assert await old.renew([held]) == [held]
        assert not await old.commit(held, make_group(held.ticket))
        claims = await new.claim(9, block_s=0.0)
        found = [(claim.ticket.number, claim.ticket.step) for claim in claims]
        assert found == [(2, 2), (1, 2), (3, 2), (4, 2)]
        assert claims[1].ticket == replace(held.ticket, step=2)
        for claim in claims:
            assert await new.commit(claim, make_group(claim.ticket))
    assert learner.unread() == [0, 2, 1, 3, 4]
    assert numbers(learner.take(4, timeout_s=0.0)) == [0, 2, 1, 3]
    assert (learner.open_tickets(), learner.cursor()) == (set(), 5)


async def test_open_evaluation_tickets_are_taken_back(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit_eval([make_ticket(n, purpose="eval") for n in range(3)])
    learner.admit([make_ticket(9)], cursor=10)
    async with buffers.worker() as worker:
        [held] = await worker.claim(1, block_s=0.0)
        assert learner.drop_eval() == 3
        assert not await worker.commit(held, make_group(held.ticket))
        assert numbers(await worker.claim(9, block_s=0.0)) == [9]
    assert learner.take_eval() == []


async def test_a_living_workers_own_late_claims_are_no_deliveries(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    async with buffers.worker("late", claim_timeout_s=0.002) as late:
        [first, second] = await late.claim(2, block_s=0.0)
        for _ in range(9):
            await asyncio.sleep(0.02)  # its renewal comes too late, each time
            assert numbers(await late.claim(2, block_s=0.0)) in ([], [2])
            assert await late.renew([first, second]) == []
        for claim in (first, second):
            assert await late.commit(claim, make_group(claim.ticket))
    assert (learner.unread(), learner.quarantined_total()) == ([0, 1], 0)


def half(ticket):
    """What may have been drawn of `ticket`: some of its first response, nothing of the others."""

    def one(ids):
        return PartialResponse(
            response_ids=Array.of(ids, "int32"),
            behavior_logprobs=Array.of([-0.5] * len(ids), "float32"),
            loss_mask=Array.of([1] * len(ids), "uint8"),
            spans=[VersionSpan(3, len(ids), "d")] if ids else [],
            finish_reason="length",
            turns=0,
            pending=len(ids),
            ended=False,
        )

    return PartialGroup(
        ticket=ticket.number, responses=[one([7, 9]), *[one([])] * (ticket.group_size - 1)]
    )


async def test_a_tickets_drawn_tokens_are_handed_on_until_commit(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(2)], cursor=2)
    async with buffers.worker("a") as a, buffers.worker("b") as b:
        first, second = await a.claim(2, block_s=0.0)
        assert first.partial is None
        kept = half(first.ticket)
        await a.release([replace(first, partial=kept), second])
        first, second = await b.claim(2, block_s=0.0)
        assert (first.partial, second.partial) == (kept, None)
        await b.release([first, second])  # before it had begun: on it goes
        first, second = await a.claim(2, block_s=0.0)
        assert first.partial == kept
        await a.release([replace(first, partial=None), replace(second, partial=None)])
        first, second = await b.claim(2, block_s=0.0)
        assert first.partial is None
        # Only the owner's word counts.
        await a.release([replace(first, partial=kept)])
        assert await b.commit(first, make_group(first.ticket))
        await b.release([replace(second, partial=half(second.ticket))])
        (again,) = await a.claim(2, block_s=0.0)
        assert again.partial == half(second.ticket)


async def test_a_released_ticket_comes_before_newer_ones(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(3)], cursor=3)
    async with buffers.worker("leaver") as leaver, buffers.worker("heir") as heir:
        claims = await leaver.claim(1, 0.0)
        await leaver.release(claims)
        assert numbers(await heir.claim(2, 0.0)) == [0, 1]
        assert not await leaver.commit(claims[0], make_group(claims[0].ticket))


async def test_a_worker_is_not_given_again_what_it_still_holds(buffers, make_ticket):
    buffers.learner().admit([make_ticket(0)], cursor=1)
    async with buffers.worker(claim_timeout_s=0.01) as worker:
        assert len(await worker.claim(5, 0.0)) == 1
        await asyncio.sleep(0.05)
        assert await worker.claim(5, 0.0) == []


async def test_evaluation_tickets_come_first_and_have_their_own_stream(
    buffers, make_ticket, make_group
):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(2)], cursor=2)
    learner.admit_eval([make_ticket(n, purpose="eval") for n in range(2)])
    async with buffers.worker() as worker:
        claims = await worker.claim(1, 0.0, training_first=True)
        assert [c.ticket.purpose for c in claims] == ["train"]
        await worker.release(claims)
        claims = await worker.claim(3, 0.0)
        assert [c.ticket.purpose for c in claims] == ["eval", "eval", "train"]
        for claim in claims:
            await worker.commit(claim, make_group(claim.ticket))
    assert numbers(learner.take_eval()) == [0, 1]
    assert learner.take_eval() == []
    assert numbers(learner.take(9, 0.0)) == [0]
    assert learner.open_tickets() == {1}


async def test_claim_waits_and_gives_no_more_than_asked_for(buffers, make_ticket):
    learner = buffers.learner()
    learner.publish_run("", {})
    async with buffers.worker() as worker:
        waiting = asyncio.create_task(worker.claim(2, block_s=20.0))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        learner.admit([make_ticket(n) for n in range(3)], cursor=3)
        assert numbers(await waiting) == [0, 1]
        assert await worker.claim(0, 0.0) == []
        assert numbers(await worker.claim(9, 0.0)) == [2]


async def test_position_trim_and_unread(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(n) for n in range(5)], cursor=5)
    assert learner.position == START
    async with buffers.worker() as worker:
        await commit_all(worker, make_group)
    assert numbers(learner.take(2, 0.0)) == [0, 1]
    checkpoint = learner.position
    assert learner.unread() == [2, 3, 4]
    assert numbers(learner.take(2, 0.0)) == [2, 3]
    learner.trim(checkpoint)
    learner.position = START
    assert learner.unread() == [2, 3, 4]


async def test_a_resumed_learner_takes_the_same_groups_again(buffers, make_ticket, make_group):
    first = buffers.learner()
    first.admit([make_ticket(n) for n in range(4)], cursor=4)
    async with buffers.worker() as worker:
        await commit_all(worker, make_group, count=3)
    first.take(1, 0.0)
    checkpoint = first.position
    lost = first.take(2, 0.0)
    second = buffers.learner()
    second.position = checkpoint
    assert (second.cursor(), second.open_tickets(), second.unread()) == (4, {3}, [1, 2])
    assert second.take(9, 0.0) == lost


async def test_take_returns_what_there_is_when_the_time_is_over(buffers, make_ticket, make_group):
    learner = buffers.learner()
    assert learner.take(2, timeout_s=0.05) == []
    learner.admit([make_ticket(0)], cursor=1)
    async with buffers.worker() as worker:
        await commit_all(worker, make_group)
    assert numbers(learner.take(2, timeout_s=0.05)) == [0]


def test_the_cursor_is_none_until_the_first_admission(buffers, make_ticket):
    learner = buffers.learner()
    assert learner.cursor() is None
    learner.admit([make_ticket(0)], cursor=1)
    learner.admit([make_ticket(0)], cursor=1)  # a lost ticket issued again, under the same cursor
    assert learner.cursor() == 1


async def test_an_invalid_group_is_refused_before_it_is_written(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    async with buffers.worker() as worker:
        [claim] = await worker.claim(1, 0.0)
        good = make_group(claim.ticket)
        with pytest.raises(RecordError, match="claim on 0"):
            await worker.commit(claim, make_group(make_ticket(1)))
        with pytest.raises(RecordError, match="responses asked for"):
            await worker.commit(claim, make_group(claim.ticket, trajectories=[]))
        assert await worker.commit(claim, good)
    assert learner.unread() == [0]


async def test_a_group_that_is_too_large_is_refused_at_its_commit(
    buffers, make_ticket, make_group, monkeypatch
):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    async with buffers.worker() as worker:
        [claim] = await worker.claim(1, 0.0)
        group = make_group(claim.ticket)
        monkeypatch.setattr("areal_q.messages.codec.MAX_RECORD_BYTES", len(encode(group)) - 1)
        with pytest.raises(RecordError, match="over the limit") as refused:
            await worker.commit(claim, group)
        await worker.quarantine(claim, str(refused.value))
        assert await worker.claim(1, 0.0) == []
    assert learner.unread() == []
    assert learner.open_tickets() == set()
    assert learner.quarantined_total() == 1


async def test_a_group_of_long_responses_arrives_as_it_was(buffers, make_ticket, make_group):
    """Longer than what a socket takes at once."""
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    tokens, rng = 300_000, np.random.default_rng(0)
    async with buffers.worker() as worker:
        [claim] = await worker.claim(1, 0.0)
        mask = Array.of(rng.integers(0, 2, tokens), "uint8")
        ids, logprobs = rng.integers(0, 1000, tokens), -rng.random(tokens)
        long = make_trajectory(1, ids, logprobs, loss_mask=mask)
        short = make_group(claim.ticket).trajectories[0]
        group = make_group(claim.ticket, trajectories=[short, long])
        assert await worker.commit(claim, group)
    assert learner.take(1, 0.0) == [group]


async def test_workers_learn_of_the_run(buffers):
    learner = buffers.learner()
    async with buffers.worker() as worker:
        waiting = asyncio.create_task(worker.run_info())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        learner.publish_run("steps = 3\n", {"announce": "ipc://a", "fetch": "ipc://b"})
        info = await waiting
        assert info.config == "steps = 3\n"
        assert info.endpoints == {"announce": "ipc://a", "fetch": "ipc://b"}


async def test_the_learner_sees_the_last_heartbeat_of_each_worker(buffers):
    learner = buffers.learner()
    assert learner.workers() == []

    def status(name: str, tokens: int) -> WorkerStatus:
        return make_beat(name, version=4, tokens=tokens, tokens_per_s=1.5, idle_share=0.25)

    async with buffers.worker("b") as b, buffers.worker("a") as a:
        await b.heartbeat(status("b", 1))
        await a.heartbeat(status("a", 2))
        await b.heartbeat(status("b", 3))
    assert learner.workers() == [status("a", 2), status("b", 3)]


async def test_arrays_come_back_bit_for_bit(buffers, make_ticket, make_group):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    logprobs = np.array([-0.0, -1e-38, -87.33655], np.float32)
    async with buffers.worker() as worker:
        [claim] = await worker.claim(1, 0.0)
        group = make_group(claim.ticket)
        second = group.trajectories[1]
        changed = replace(second, behavior_logprobs=Array.of(logprobs))
        await worker.commit(claim, replace(group, trajectories=[group.trajectories[0], changed]))
    [group] = learner.take(1, 0.0)
    got = group.trajectories[1].behavior_logprobs.numpy()
    assert got.tobytes() == logprobs.tobytes()


def test_a_poison_ticket_is_quarantined_and_the_next_served(buffers, make_ticket):
    learner = buffers.learner()
    assert learner.quarantined_total() == 0
    buffers.poison("tickets")
    learner.admit([make_ticket(1)], cursor=2)

    async def work() -> list[int]:
        async with buffers.worker() as worker:
            return numbers(await worker.claim(5, 0.0))

    assert asyncio.run(work()) == [1]
    assert learner.quarantined_total() == 1
    assert learner.open_tickets() == {1}


def test_a_ticket_that_kills_every_worker_goes_to_the_quarantine(buffers, make_ticket):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)

    async def lives(count: int) -> list[list[int]]:
        seen = []
        for life in range(count):
            async with buffers.worker(f"victim-{life}", claim_timeout_s=0.02) as victim:
                victim.max_deliveries = 3
                seen.append(numbers(await victim.claim(9, 0.0)))
                await asyncio.sleep(0.03)
        return seen

    assert asyncio.run(lives(5)) == [[0], [0], [0], [], []]
    assert learner.quarantined_total() == 1
    learner.admit([make_ticket(1)], cursor=2)
    assert asyncio.run(lives(1)) == [[1]]
    assert learner.open_tickets() == {1}


async def test_handing_a_ticket_back_is_no_failure_on_it(buffers, make_ticket):
    learner = buffers.learner()
    learner.admit([make_ticket(0)], cursor=1)
    for life in range(9):
        async with buffers.worker(f"w{life}") as worker:
            worker.max_deliveries = 2
            claims = await worker.claim(1, 0.0)
            assert numbers(claims) == [0]
            await worker.release(claims)
    assert learner.quarantined_total() == 0
