"""One learner leads a run: the lease, its fencing token, and the id that tells runs of one name apart."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from areal_q.errors import RunChanged, RunFinished, RunTaken, Stopped
from areal_q.messages import Group, Ticket
from areal_q.system import run_dir
from buffer.redis_store import LearnerBuffer, WorkerBuffer, lease, worker_side
from buffer.redis_store.keys import Keys
from buffer.redis_store.lease import LeasedConnection, Owner, owner_of

KEYS = Keys("run")
MakeLearner = Callable[..., LearnerBuffer]


def owner(run_id: str, place: str = "here", pid: int = 1) -> Owner:
    return Owner(run_id=run_id, place=place, host="node-7", pid=pid, since_s=0.0)


@pytest.fixture(params=["redis 6.2", "redis 7", "valkey 9"])
def url(request: pytest.FixtureRequest) -> str:
    return request.getfixturevalue("servers")(request.param)


@pytest.fixture
def make(url: str) -> Iterator[MakeLearner]:
    """make("id", "place") is a learner that has acquired the run."""
    made: list[LearnerBuffer] = []

    def make(run_id: str, place: str = "here") -> LearnerBuffer:
        made.append(LearnerBuffer(url, "run"))
        made[-1].acquire(owner(run_id, place))
        return made[-1]

    yield make
    for learner in made:
        learner.close()


@pytest.fixture
def client(url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(url) as made:
        yield made


def writes(learner: LearnerBuffer, ticket: Ticket) -> list[Callable[[], object]]:
    """Everything by which a learner changes the run."""
    return [
        lambda: learner.admit([ticket], cursor=99),
        lambda: learner.admit_eval([ticket]),
        lambda: learner.readmit(-1),
        learner.drop_eval,
        learner.take_eval,
        lambda: learner.trim("0-0"),
        lambda: learner.publish_run("x = 2", {}),
        lambda: learner.take(1, timeout_s=0.0),  # a poison group goes to the quarantine
        learner.finish,
        learner.forget,
    ]


@pytest.mark.parametrize("redis_is", ["as it was", "flushed", "flushed, its clock set back"])
def test_a_learner_that_was_followed_changes_nothing_any_more(
    make: MakeLearner, client: redis.Redis, make_ticket: Callable[..., Ticket], redis_is: str
):
    if "clock" in redis_is:
        client.hset(
            KEYS.owner, "token", 2**52
        )  # tokens begin above the time that the clock goes back to
    first = make("a")
    client.hset(KEYS.owner, "until", 0)  # it was stopped for longer than its lease
    if "clock" in redis_is:
        client.flushall()
    second = make("b", place="elsewhere")
    if redis_is == "flushed":
        client.flushall()
    second.publish_run("x = 1", {})
    second.admit([make_ticket(1)], cursor=2)
    second.admit_eval([make_ticket(1, purpose="eval")])
    client.xadd(KEYS.groups, {"record": b"poison"}, id="1-1")
    client.xadd(KEYS.eval_groups, {"record": b"poison"}, id="1-1")
    second.publish_run("x = 1", {})
    before = {key: client.dump(key) for key in client.keys("*")}
    for write in writes(first, make_ticket(0)):
        with pytest.raises(RunTaken) as refused:
            write()
        assert ("process 1 on host node-7" in str(refused.value)) == (redis_is != "flushed")
    assert {key: client.dump(key) for key in client.keys("*")} == before
    for write in writes(second, make_ticket(0)):
        write()


@pytest.mark.parametrize("place, lease_over", [("here", False), ("elsewhere", True)])
def test_a_learner_goes_on_where_redis_was_restored(
    make: MakeLearner, client: redis.Redis, place: str, lease_over: bool
):
    """What is restored knows the learner before only: of this directory, or with a lease that is over."""
    make("a", place=place)
    if lease_over:
        client.hset(KEYS.owner, "until", 0)
    earlier: Any = client.dump(KEYS.owner)
    learner = make("a")
    client.restore(KEYS.owner, 0, earlier, replace=True)
    learner.trim("0-0")
    assert client.hget(KEYS.owner, "token") == learner._connection._token


def test_a_second_learner_is_refused_with_the_name_of_the_first(
    make: MakeLearner, url: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    first = make("a")
    first.publish_run("x = 1", {})
    second = LearnerBuffer(url, "run")
    with pytest.raises(RunTaken, match=r"process 1 on host node-7, since 1970-01-01 00:00:00 UTC"):
        second.acquire(owner("b", place="elsewhere", pid=2))
    second.close()
    first.trim("0-0")
    first.close()
    make("b", place="elsewhere")  # at once: the first one gave the run free


def test_a_crashed_learner_is_followed_from_its_directory(
    make: MakeLearner, client: redis.Redis, tmp_path: Path
):
    made = [owner_of("a", tmp_path), owner_of("a", tmp_path)]
    assert made[0].place == made[1].place
    (tmp_path / "copy").mkdir()
    assert owner_of("a", tmp_path / "copy").place != made[0].place
    first, second = make("a"), make("a")
    with pytest.raises(RunTaken):
        first.trim("0-0")
    second.trim("0-0")


def test_a_lease_ends_though_the_clock_stepped_back(
    make: MakeLearner, url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    """As if Redis's clock had been an hour ahead when the learner that is gone renewed it."""
    monkeypatch.setattr(lease, "LEASE_S", 0.3)
    monkeypatch.setattr(lease, "RENEW_S", 3600)
    gone = make("a")
    now_s, _ = client.time()  # pyright: ignore[reportGeneralTypeIssues]
    client.hset(KEYS.owner, "until", (now_s + 3600) * 1000)
    other = LearnerBuffer(url, "run")
    other.acquire(owner("b", "elsewhere"))
    other.trim("0-0")
    with pytest.raises(RunTaken):
        gone.trim("0-0")
    other.close()


def test_a_stop_ends_the_wait_for_the_end_of_a_lease(
    make: MakeLearner, url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "LEASE_S", 3600)
    monkeypatch.setattr(lease, "RENEW_S", 3600)  # it is gone
    make("a")
    stop = threading.Event()
    stop.set()
    other = LearnerBuffer(url, "run")
    with pytest.raises(Stopped):
        other.acquire(owner("b", "elsewhere"), stop)
    threading.Timer(0.5, lambda: client.hset(KEYS.owner, "until", 0)).start()
    other.acquire(owner("b", "elsewhere"))
    other.close()


@pytest.mark.timeout(60)
def test_a_learner_that_only_waits_learns_that_it_was_followed(
    make: MakeLearner, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    first = make("a")
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    client.hset(KEYS.owner, "until", 0)
    make("b", place="elsewhere")
    with pytest.raises(RunTaken):
        while True:
            first.read(1, timeout_s=0.1)


def test_a_learner_comes_back_to_a_full_redis(make: MakeLearner, client: redis.Redis):
    """Only a learner makes room: one that crashed while Redis was full once could not start again."""
    make("a").publish_run("x = 1", {})
    client.config_set("maxmemory", 1)
    try:
        second = make("a")
        second.publish_run("x = 2", {})
        until: Any = client.hget(KEYS.owner, "until")
        second.close()
        freed: Any = client.hget(KEYS.owner, "until")
        assert int(freed) < int(until)
        assert client.hget(KEYS.info, "config") == b"x = 2"
    finally:
        client.config_set("maxmemory", 0)


def test_a_lease_that_is_not_renewed_is_said_once_per_outage(
    make: MakeLearner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    tries: list[float] = []

    def fails(connection: LeasedConnection, seconds: float) -> bool:
        tries.append(seconds)
        if len(tries) == 3:  # the outage ends, and another begins
            return False
        raise redis.ConnectionError("gone")

    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    monkeypatch.setattr(LeasedConnection, "_renew", fails)
    learner = make("a")
    while len(tries) < 6:
        time.sleep(0.01)
    monkeypatch.undo()
    learner.close()
    assert caplog.text.count("the lease of the run is not renewed") == 2


async def test_what_redis_lost_of_a_run_is_written_again(
    make: MakeLearner, url: str, client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(lease, "RENEW_S", 0.05)
    learner = make("a")
    learner.publish_run("x = 1", {"announce": "tcp://a:1"}, "hash")
    client.flushall()
    worker = WorkerBuffer(url, "run", "late")
    info = await worker.run_info()
    assert info == ("x = 1", {"announce": "tcp://a:1"}, "a", "hash", False)
    worker.run.join(info)
    await worker.run.check()
    await worker.close()
    other = LearnerBuffer(url, "run")
    with pytest.raises(RunTaken):
        other.acquire(owner("b", "elsewhere"))
    other.close()


async def test_a_worker_notices_another_run_and_other_settings(
    make: MakeLearner,
    url: str,
    make_ticket: Callable[..., Ticket],
    make_group: Callable[..., Group],
):
    learner = make("a")
    learner.publish_run("x = 1", {}, "one")
    learner.admit([make_ticket(n, run_id="a") for n in range(2)], cursor=2)
    worker = WorkerBuffer(url, "run", "w")
    worker.run.join(await worker.run_info())
    await worker.run.check()
    [claim, _] = await worker.claim(2, block_s=0.0)
    learner.publish_run("x = 2", {}, "two")
    with pytest.raises(RunChanged, match="other settings"):
        await worker.run.check()
    learner.run_id = "b"
    learner.publish_run("x = 1", {}, "one")
    with pytest.raises(RunChanged, match="its id is b, this worker was set up for a"):
        await worker.run.check()
    with pytest.raises(RunChanged, match="its id is b"):
        await worker.commit(claim, make_group(claim.ticket))
    learner.admit([make_ticket(7, run_id="b")], cursor=8)
    with pytest.raises(RunChanged, match="its id is b"):
        await worker.claim(9, block_s=0.0)
    other = WorkerBuffer(url, "run", "other")
    assert [c.ticket.number for c in await other.claim(9, block_s=0.0)] == [7]  # handed back
    await other.close()
    await worker.close()
    assert learner.unread() == []


async def test_a_worker_ends_with_its_run_unless_it_is_taken_up(make: MakeLearner, url: str):
    learner = make("a")
    learner.publish_run("x = 1", {}, "one")
    worker = WorkerBuffer(url, "run", "w")
    worker.run.join(await worker.run.unfinished(0.0))
    await worker.run.check()
    learner.finish()
    with pytest.raises(RunFinished, match="run run is finished"):
        await worker.run.check()
    with pytest.raises(RunFinished):
        await worker.run.unfinished(0.0)
    waits = asyncio.create_task(worker.run.unfinished(1e6))
    await asyncio.sleep(0.5)
    assert not waits.done()
    make("a")
    assert (await waits).config == "x = 1"
    await worker.run.check()
    await worker.close()


def test_a_claim_that_waits_outlives_its_stream(
    make: MakeLearner,
    url: str,
    client: redis.Redis,
    make_ticket: Callable[..., Ticket],
    monkeypatch,
):
    """As a new run of the name deletes it. With Redis 7.0 it once ended the worker with UNBLOCKED."""
    monkeypatch.setattr(worker_side, "BLOCK_SLICE_S", 60.0)
    learner = make("a")
    learner.publish_run("x = 1", {})

    async def work() -> list[int]:
        worker = WorkerBuffer(url, "run", "w")
        waits = asyncio.create_task(worker.claim(1, block_s=60.0))
        while not client.info("clients")["blocked_clients"]:  # pyright: ignore
            await asyncio.sleep(0.01)
        client.delete(KEYS.tickets, KEYS.eval_tickets)
        # Redis 6.2 ends the wait when the stream exists again, later ones when it is deleted.
        learner.admit([make_ticket(5)], cursor=6)
        claims = await waits
        await worker.close()
        return [claim.ticket.number for claim in claims]

    assert asyncio.run(work()) == [5]


async def test_a_group_of_a_foreign_run_goes_to_the_quarantine(
    make: MakeLearner, url: str, make_ticket: Callable[..., Ticket], make_group
):
    learner = make("a")
    tickets = [make_ticket(n, run_id=id) for n, id in enumerate(["a", "b", ""])]
    learner.admit(tickets, cursor=3)
    worker = WorkerBuffer(url, "run", "of before there were ids")
    for claim in await worker.claim(9, block_s=0.0):
        assert await worker.commit(claim, make_group(claim.ticket))
    await worker.close()
    assert [group.ticket.number for group in learner.take(9, 0.0)] == [0, 2]
    assert learner.quarantined_total() == 1


def test_an_id_is_made_once_and_kept_in_the_directory(tmp_path: Path):
    (tmp_path / "other").mkdir()
    first = run_dir.run_id(tmp_path)
    assert run_dir.run_id(tmp_path) == run_dir.run_id(tmp_path, before="x") == first
    assert run_dir.run_id(tmp_path / "other") != first
    (tmp_path / "run-id").unlink()
    assert run_dir.run_id(tmp_path, before=first) == first


async def test_a_worker_says_which_learner_it_waits_for(url: str, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    worker = WorkerBuffer(url, "TYPO", "w")
    waits = asyncio.create_task(worker.run_info())

    def said() -> list[str]:
        return [r.getMessage() for r in caplog.records if "waiting" in r.getMessage()]

    while not said():
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)
    waits.cancel()
    await asyncio.wait([waits])
    await worker.close()
    assert len(said()) == 1
    assert said()[0].startswith("waiting for a learner of run TYPO at unix://")


@pytest.mark.parametrize("half", ["config", "endpoints"])
async def test_a_run_that_is_described_by_half_is_waited_for(
    url: str, client: redis.Redis, half: str
):
    client.hset(KEYS.info, half, b"{}")
    worker = WorkerBuffer(url, "run", "w")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(worker.run_info(), 0.5)
    await worker.close()
