"""The rollout worker between a real Redis and a real weight_server, with both engines."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
import redis
import torch
from helpers.commands import stretched
from helpers.engines import HeldStepper, ask, ask_for, serving
from helpers.fixture_types import MakeRun
from helpers.policies import build_group_reader, initial_model, new_admission
from helpers.strategies import begun
from helpers.weight_sync import publish
from msgspec.structs import asdict

from areal_q.config import Run, ScriptedEngine, TorchEngine, dump_toml, override
from areal_q.errors import ConfigError, RecordError
from areal_q.messages import (
    Array,
    Group,
    PartialGroup,
    Ticket,
    VersionSpan,
)
from areal_q.models import Decoder
from areal_q.quant.state_dict import is_quantized
from areal_q.tasks import (
    GRADERS,
    Problem,
    Score,
    build_task,
    build_tokenizer,
    problem_at,
)
from areal_q.weights.version import WeightVersion, digest_of
from buffer.redis_store import Claim, LearnerBuffer, WorkerBuffer
from buffer.redis_store.connection import Patience, insist_async
from buffer.redis_store.keys import WORKERS_GROUP, Keys
from buffer.sampling.replay_pool import SampledGroups
from buffer.weight_sync import WeightServer, WeightSource, WeightSubscriber
from learner.backends.single_device import token_logprobs
from learner.data.packing import pack_samples, samples_of
from learner.data.staleness import VersionHistory
from learner.publishing.version_builder import VersionBuilder
from rollout.build import EndpointAddress, serve
from rollout.engines import build_engine
from rollout.engines.base import Completion, Engine
from rollout.engines.process.streaming_engine import StreamingEngine
from rollout.engines.reference.async_engine import AsyncEngine
from rollout.engines.reference.torch_engine import TorchStepper
from rollout.engines.scripted import scripted_engine
from rollout.environments.base import Environment, Response
from rollout.environments.engine_client import EngineClient
from rollout.environments.registry import build_environment
from rollout.openai_server.app import Endpoint
from rollout.worker import Worker, WorkerCapacity

SCRIPTED = "rollout.engine.type=scripted"
LONG = "model.max_positions=256"
ONE = ["learner.groups=1", "learner.minibatches=1", LONG]


class LearnerSide:
    """All of a learner that a worker meets."""

    def __init__(self, run: Run, url: str, sockets: Path) -> None:
        self.run, self.url = run, url
        self.buffer = LearnerBuffer(url, run.name)
        self.tokenizer = build_tokenizer(run.model, run.task)
        self.admission = new_admission(run, self.buffer)
        self.model: Decoder = initial_model(run)
        self.history = VersionHistory(keep=100)
        self.builder = VersionBuilder(run)
        self.weight_server = WeightServer(f"ipc://{sockets}/announce", f"ipc://{sockets}/fetch")
        self.buffer.publish_run(dump_toml(run), self.weight_server.endpoints._asdict())

    def publish(self, version: int) -> None:
        made = self.builder.build(self.model, version)
        self.history.add(version, made.manifest.digest)
        publish(self.weight_server, made)

    def change(self) -> None:
        """As an update would, coarsely."""
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(0.02 * torch.randn(p.shape))

    async def take(self, count: int) -> list[Group]:
        groups: list[Group] = []
        while len(groups) < count:
            groups += await asyncio.to_thread(self.buffer.take, count - len(groups), 0.5)
        return groups

    def close(self) -> None:
        self.weight_server.close()
        self.buffer.close()


@pytest.fixture
def learner(redis_url: str, short_dir: Path) -> Iterator[Callable[[Run], LearnerSide]]:
    made: list[LearnerSide] = []

    def make(run: Run) -> LearnerSide:
        torch.manual_seed(0)
        made.append(LearnerSide(run, redis_url, short_dir))
        return made[-1]

    yield make
    for side in made:
        side.close()


@asynccontextmanager
async def working(
    side: LearnerSide,
    engine: Engine | None = None,
    environment: Environment | None = None,
    limit: WorkerCapacity | None = None,
    begin: Callable[[], Awaitable[object]] | None = None,
) -> AsyncIterator[Engine]:
    """A worker that works meanwhile, with the engine and environment of the settings if none are given."""
    run = side.run
    endpoints = side.weight_server.endpoints
    subscriber = WeightSubscriber(endpoints.announce, endpoints.fetch, run=run.name)
    buffer = WorkerBuffer(side.url, run.name, "w", run.buffer.claim_timeout_s)
    engine = engine or build_engine(run.rollout.engine)
    client = EngineClient(engine, side.tokenizer, run.rollout.request_timeout_s)
    worker = Worker(
        name="w",
        engine=engine,
        buffer=buffer,
        subscriber=subscriber,
        tokenizer=side.tokenizer,
        environment=environment or build_environment(run, client),
        run=run,
        capacity=limit,
    )
    task = asyncio.create_task(worker.run(begin))
    try:
        yield engine
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        subscriber.close()
        await buffer.close()


async def until(condition: Callable[[], object]) -> None:
    while not condition():
        await asyncio.sleep(0.01)


async def test_an_engine_can_be_asked_before_the_first_weights(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """An endpoint that is there before its engine would refuse what comes in between."""
    side = learner(make_run("rollout.engine.type=torch"))
    engine = build_engine(side.run.rollout.engine)
    request = ask([3, 4], **asdict(side.run.rollout.sampling))
    asked: list[asyncio.Task[list[Completion]]] = []

    async def begin() -> None:
        asked.append(asyncio.create_task(engine.generate(request)))
        await asyncio.sleep(0)

    async with working(side, engine, begin=begin):
        await until(lambda: asked)
        side.publish(0)
        (completion,) = await asked[0]
        assert completion.spans[0].version == 0


@pytest.mark.parametrize("engine", ["scripted", "torch"])
async def test_every_ticket_becomes_one_valid_group(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], engine: str
):
    side = learner(make_run(f"rollout.engine.type={engine}", "learner.group_size=3"))
    score = GRADERS[side.run.task.grader].score
    async with working(side):
        side.publish(0)
        side.admission.admit(0)
        side.admission.evaluate(0)
        for group in await side.take(12):
            group.validate()
            ticket = group.ticket
            assert (group.engine, group.weight_format) == (engine, "int8")
            assert ticket.number in side.admission.outstanding
            side.admission.done(group)
            assert 0 < group.started_s <= group.finished_s <= time.time()
            for t in group.trajectories:
                ids = t.response_ids.numpy().tolist()
                text = side.tokenizer.decode(ids)
                expected = score(Problem(ticket.prompt, ticket.answer), text)
                assert (t.reward, t.reward_parts["correct"]) == (
                    expected.reward,
                    expected.correct,
                )
                assert (t.finish_reason == "stop") == (ids[-1] == side.tokenizer.eos_id)
                assert t.loss_mask.numpy().all()
                assert side.history.lag(t.spans[0], 0) == 0
        assert not side.admission.outstanding
        evaluations = []
        await until(lambda: evaluations.extend(side.buffer.take_eval()) or len(evaluations) == 20)
        assert {g.ticket.purpose for g in evaluations} == {"eval"}
        assert side.buffer.open_tickets() == set()


async def test_an_evaluation_leaves_room_for_training(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    side = learner(make_run("learner.group_size=3"))

    async with working(side, limit=WorkerCapacity(responses=12, slots=12, group_size=3)):
        side.admission.evaluate(1)  # more tickets than fit; they wait for version 1
        side.publish(0)
        side.admission.admit(0)
        assert len(await side.take(12)) == 12


async def test_a_long_answer_holds_up_none_of_its_evaluation(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """What ends of an evaluation's share is taken up again, though training waits and one answer goes on."""
    side = learner(make_run("learner.group_size=3"))
    begun: list[str] = []

    class Held(Environment):
        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
            begun.append(ticket.purpose)
            if len(begun) == 1 or ticket.purpose == "train":
                await asyncio.Event().wait()

    side.admission.evaluate(0)
    side.admission.admit(0)
    side.publish(0)
    limit = WorkerCapacity(responses=28, slots=28, group_size=3)  # of which 3 are an evaluation's
    async with working(side, environment=Held(), limit=limit):
        await until(lambda: begun.count("eval") > 3)


async def test_an_evaluation_of_several_samples_takes_no_larger_share(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """Its answers count, not its problems: those of one problem are more than the share, so that one at a time
    is claimed."""
    sets = "eval.sets.more={problems=9, samples=5}"
    run = make_run("learner.group_size=3", sets)
    side = learner(run)
    begun: list[str] = []

    class Held(Environment):
        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
            begun.append(ticket.purpose)
            await asyncio.Event().wait()

    side.admission.evaluate(0, [one for one in side.admission.sets if one.name == "more"])
    side.admission.admit(0)
    side.publish(0)
    limit = WorkerCapacity.of(run)._replace(responses=28, slots=28)
    async with working(side, environment=Held(), limit=limit):
        await until(lambda: begun.count("train") == 7)
        assert begun.count("eval") == 1


async def test_a_heartbeat_tells_of_a_failure_in_one_harmless_line(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """Whatever text an environment of the user's own raised."""
    side = learner(make_run())

    class Failed(Environment):
        failure = "ValueError:\n  \x1b[2J" + "x" * 600

        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None: ...

    async with working(side, environment=Failed()):
        await until(lambda: any(worker.failure for worker in side.buffer.workers()))
    (worker,) = side.buffer.workers()
    assert worker.failure == ("ValueError: \\x1b[2J" + "x" * 600)[:512]


@pytest.mark.parametrize(("newest", "then"), [(1, "train"), (9, "eval")])
async def test_an_evaluation_that_is_late_goes_first(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], newest: int, then: str
):
    """Behind training it would be answered by the weights that there are when training ends."""
    side = learner(make_run("learner.group_size=3", "learner.max_lag=2"))
    begun: list[str] = []

    class Held(Environment):
        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
            begun.append(ticket.purpose)
            await asyncio.Event().wait()

    side.admission.evaluate(0)
    side.admission.admit(0)
    side.publish(newest)
    limit = WorkerCapacity(responses=12, slots=12, group_size=3)
    async with working(side, environment=Held(), limit=limit):
        await until(lambda: len(begun) >= 3)
        assert begun[:3] == ["eval", then, then]


@pytest.mark.vllm
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore")
def test_killed_vllm_comes_back_and_no_ticket_is_lost(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    pytest.importorskip("vllm", reason="vLLM is not installed")
    shape = ["model.width=64", "model.heads=2", "model.kv_heads=1", "model.max_positions=512"]
    long = ["rollout.sampling.max_tokens=400", "learner.groups=4", "learner.max_lag=0"]
    side = learner(make_run("rollout.engine.type=vllm", *shape, *long))

    async def work() -> None:
        async with working(side) as engine:
            assert isinstance(engine, StreamingEngine)
            side.publish(0)
            side.admission.admit(0)
            await until(lambda: engine.tokens_drawn > 8)
            await engine.backend.kill()
            side.admission.issue([4, 5], version=0)
            groups = await side.take(6)
            assert {g.ticket.number for g in groups} == set(range(6))
            assert (engine.deaths, engine.version) == (1, 0)
            for t in [t for group in groups for t in group.validate().trajectories]:
                assert [side.history.lag(span, 0) for span in t.spans] == [0]

    asyncio.run(work())


@pytest.mark.timeout(60)
async def test_new_weights_are_stamped_on_the_tokens_that_they_draw(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    settings = [SCRIPTED, LONG, "rollout.sampling.max_tokens=200"]
    side = learner(make_run(*settings, "learner.groups=2", "learner.max_lag=0"))
    # No stop token is ever drawn: every response has its full length, and takes two seconds.
    talker = scripted_engine(
        ScriptedEngine(tokens_per_s=100), answer=lambda _: [3] * 200, certainty=lambda _: 1.0
    )
    async with working(side, talker) as engine:
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: engine.tokens_drawn > 8)
        side.change()
        side.publish(1)
        groups = await side.take(2)
        for t in [t for group in groups for t in group.trajectories]:
            assert [span.version for span in t.spans] == [0, 1]
            assert sum(span.tokens for span in t.spans) == t.num_tokens == 200
            assert [side.history.lag(span, 1) for span in t.spans] == [1, 0]
            assert {s.digest for s in t.spans} == set(side.history.digests.values())


async def test_a_ticket_waits_for_weights_as_new_as_itself(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    side = learner(make_run(SCRIPTED))
    async with working(side) as engine:
        side.publish(0)
        await until(lambda: engine.version == 0)
        side.admission.issue([0, 1], version=2)
        side.admission.issue([2], version=0)
        assert [g.ticket.number for g in await side.take(1)] == [2]
        side.publish(1)
        await until(lambda: engine.version == 1)
        await asyncio.sleep(0.2)
        assert side.buffer.unread() == []
        side.publish(3)
        groups = await side.take(2)
        assert {g.ticket.number for g in groups} == {0, 1}
        spans = [s for g in groups for t in g.trajectories for s in t.spans]
        assert {s.version for s in spans} == {3}


async def test_a_worker_without_weights_leaves_tickets_to_others(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """Behind a relay that had none it kept all of them, renewed, and the run stood still."""
    side = learner(make_run(SCRIPTED))
    side.admission.admit(0)
    async with working(side) as engine:
        await until(lambda: side.buffer.workers())
        other = WorkerBuffer(side.url, side.run.name, "other")
        claims = await other.claim(100, block_s=0.0)
        assert {c.ticket.number for c in claims} == side.admission.outstanding
        await other.release(claims)
        await other.close()
        side.publish(0)
        await side.take(len(claims))
        assert engine.version == 0


async def test_workers_full_of_old_history_do_not_stop_the_learner(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """The learner came back at version 2, and the groups that led it to version 9 before are of no use."""
    side = learner(make_run(SCRIPTED, "learner.groups=4", "learner.max_lag=1"))
    group_reader = build_group_reader(side.run, side.buffer, side.admission, side.history)
    stop = threading.Event()
    try:
        side.admission.issue([0, 1, 2, 3], version=9)
        side.admission.issue([4, 5], version=2)
        async with working(side, limit=WorkerCapacity(responses=4, slots=4, group_size=2)):
            side.publish(2)
            taken = await asyncio.to_thread(group_reader.take, 2, stop)
            assert taken
            assert {g.ticket.step for g in taken.groups} == {2}
            assert len({g.ticket.number for g in taken.groups}) == 4
    finally:
        stop.set()


async def test_it_is_full_before_the_learner_asks_again(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=1", "learner.max_lag=0", "learner.groups=2"]
    side = learner(make_run(*slow))
    async with working(side) as engine:
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: engine.active == 4)
        status = []
        await until(lambda: status.extend(side.buffer.workers()) or status)
        assert (status[0].worker, status[0].version, status[0].pid) == ("w", 0, os.getpid())


@pytest.mark.timeout(60)
async def test_a_worker_is_alive_while_its_engine_takes_a_step(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """A step of a real model took seconds, on the loop: no heartbeat came, and the learner said that no worker
    was alive."""
    side = learner(make_run(SCRIPTED, "learner.max_lag=0", "learner.groups=2"))
    stepper = HeldStepper()
    engine = AsyncEngine(stepper)
    run, name = side.run, side.run.name
    endpoint = Endpoint(engine, side.tokenizer, name, None, run.rollout.sampling, "0", None)
    port = await endpoint.start()
    client = redis.Redis.from_url(side.url)

    def idle_ms() -> int:
        entries: Any = client.xpending_range(Keys(name).tickets, WORKERS_GROUP, "-", "+", 9)
        return max(entry["time_since_delivered"] for entry in entries)

    async with working(side, engine):
        side.publish(0)
        side.admission.admit(0)
        await stepper.in_step()
        beats = {status.time_s for status in side.buffer.workers()}
        held, renewed = engine.busy_s, False
        while len(beats) < 3 or not renewed:
            before = idle_ms()
            await asyncio.sleep(0.1)
            renewed = renewed or idle_ms() < before
            beats |= {status.time_s for status in side.buffer.workers()}
        url = f"http://127.0.0.1:{port}/v1/models"
        async with aiohttp.ClientSession() as http, http.get(url) as answer:
            assert (await answer.json())["version"] == 0
        (status,) = side.buffer.workers()
        assert (status.tokens, status.active, status.waits_for) == (0, 0, "")
        assert engine.busy_s > held and status.idle_share < 1
        stepper.let_go()
        for group in await side.take(2):
            group.validate()
    await endpoint.close()


async def test_a_worker_says_that_its_engine_starts(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], monkeypatch: pytest.MonkeyPatch
):
    """vLLM took a minute, in which the run waited for "the first weights", which were there."""
    side = learner(make_run(SCRIPTED))
    engine = build_engine(side.run.rollout.engine)
    loads, started = engine.load_weights, asyncio.Event()

    async def starts(weights: WeightVersion) -> float:
        await started.wait()
        return await loads(weights)

    monkeypatch.setattr(engine, "load_weights", starts)

    def waits() -> set[str]:
        return {status.waits_for for status in side.buffer.workers()}

    async with working(side, engine):
        await until(lambda: waits() == {f"the first weights of run {side.run.name}"})
        side.publish(0)
        await until(lambda: waits() == {"engine scripted, which starts"})
        started.set()
        await until(lambda: waits() == {"tickets"})


@pytest.mark.timeout(60)
async def test_a_worker_told_to_go_does_not_wait_for_a_step(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("rollout.engines.reference.async_engine.PATIENCE_S", 0.1)
    side = learner(make_run(SCRIPTED, "learner.max_lag=0", "learner.groups=2"))
    stepper = HeldStepper()
    async with working(side, AsyncEngine(stepper)):
        side.publish(0)
        side.admission.admit(0)
        await stepper.in_step()
    other = WorkerBuffer(side.url, side.run.name, "other", claim_timeout_s=3600)
    assert {c.ticket.number for c in await other.claim(10, block_s=0.0)} == {0, 1}
    await other.close()
    stepper.let_go()


@pytest.mark.timeout(60)
async def test_tickets_that_another_worker_took_over_are_abandoned(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], make_group: Callable[..., Group]
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=1", "learner.max_lag=0", "learner.groups=2"]
    side = learner(make_run(*slow))
    async with working(side) as engine:
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: engine.active == 4)
        thief = WorkerBuffer(side.url, side.run.name, "thief", claim_timeout_s=0.001)
        await asyncio.sleep(0.01)
        claims = await thief.claim(10, block_s=0.0)
        assert {claim.ticket.number for claim in claims} == {0, 1}
        await until(lambda: engine.active == 0)
        for claim in claims:
            assert await thief.commit(claim, make_group(claim.ticket, worker="thief"))
        await thief.close()
        assert {g.worker for g in await side.take(2)} == {"thief"}
        # It is free for other work.
        side.admission.issue([7], version=0)
        await until(lambda: engine.active == 2)


async def test_a_renewal_takes_no_commit_under_way_for_a_lost_ticket(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], monkeypatch: pytest.MonkeyPatch
):
    commit = WorkerBuffer.commit

    async def answered_late(self: WorkerBuffer, claim: Claim, group: Group) -> bool:
        committed = await commit(self, claim, group)
        await asyncio.sleep(0.05)
        return committed

    monkeypatch.setattr(WorkerBuffer, "commit", answered_late)
    monkeypatch.setattr("rollout.worker.HEARTBEAT_S", 0.01)
    side = learner(make_run(SCRIPTED, "learner.max_lag=2", "learner.groups=4"))
    async with working(side):
        side.publish(0)
        side.admission.admit(0)
        await side.take(12)
        await until(lambda: [s.groups for s in side.buffer.workers()] == [12])


async def test_a_worker_that_ends_hands_its_tickets_back(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=1", "learner.max_lag=0", "learner.groups=2"]
    side = learner(make_run(*slow))
    async with working(side) as engine:
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: engine.active == 4)
    other = WorkerBuffer(side.url, side.run.name, "other", claim_timeout_s=3600)
    assert {c.ticket.number for c in await other.claim(10, block_s=0.0)} == {0, 1}
    await other.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_and_returns_its_tickets(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], number: int
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=1", "buffer.claim_timeout_s=3600"]
    side = learner(make_run(*slow))
    side.publish(0)
    side.admission.admit(0)
    command = [sys.executable, "-m", "rollout", "--redis", side.url, "--run", side.run.name]
    process = subprocess.Popen([*command, "--id", "mortal"], stderr=subprocess.PIPE, text=True)
    try:
        active = []
        await until(lambda: active.extend(w.active for w in side.buffer.workers()) or any(active))
        process.send_signal(number)
        _, said = await asyncio.to_thread(process.communicate)
        assert process.returncode == 128 + number, said
        assert "Traceback" not in said
        other = WorkerBuffer(side.url, side.run.name, "other", claim_timeout_s=3600)
        assert {c.ticket.number for c in await other.claim(100, block_s=0.0)} == set(range(12))
        await other.close()
    finally:
        process.kill()
        process.wait()


async def uninterrupted(side: LearnerSide, ticket: Ticket, engine: Engine) -> list[Any]:
    """What an engine that nobody stops draws for `ticket`."""
    async with serving(engine, side.builder.build(side.model, 0)):
        return await engine.generate(ask_for(ticket, side.tokenizer.eos_id))


async def test_the_next_worker_goes_on_from_the_drawn_tokens(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    settings = ["rollout.format=bf16", "rollout.sampling.max_tokens=200", LONG]
    side = learner(make_run(*settings, "learner.max_lag=0", "learner.group_size=4"))
    config = side.run.rollout.engine
    assert isinstance(config, TorchEngine)
    slow = TorchStepper(config)
    slow.tokens_per_s = 400
    async with working(side, AsyncEngine(slow)) as engine:
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: engine.tokens_drawn > 100)
    done = side.buffer.take(4, 0.0)
    other = WorkerBuffer(side.url, side.run.name, "other", claim_timeout_s=3600)
    claims = await other.claim(4, block_s=0.0)
    assert len(claims) == 4 - len(done)
    drawn = {c.ticket.number: c.partial.responses for c in claims if c.partial}
    await other.release(claims)
    await other.close()
    async with working(side) as engine:
        groups = await side.take(len(claims))
        tokens = sum(t.num_tokens for g in groups for t in g.trajectories)
        kept = sum(r.response_ids.shape[0] for half in drawn.values() for r in half)
        assert kept > 0 and engine.tokens_drawn == tokens - kept
    for group in groups:
        engine = build_engine(config)
        want = await uninterrupted(side, group.ticket, engine)
        for t, completion in zip(group.trajectories, want, strict=True):
            assert t.response_ids.numpy().tolist() == completion.response_ids.tolist()
            assert t.finish_reason == completion.finish_reason
            assert [s.version for s in t.spans] == [0]
            found = t.behavior_logprobs.numpy()
            np.testing.assert_allclose(found, completion.logprobs, atol=1e-4)
            if group.ticket.number in drawn:
                before = drawn[group.ticket.number][t.index].behavior_logprobs.numpy()
                assert found[: len(before)].tolist() == before.tolist()


@pytest.mark.parametrize("max_lag, versions", [(1, [0, 1]), (0, [1])])
async def test_too_old_tokens_are_drawn_again_others_keep_versions(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], max_lag: int, versions: list[int]
):
    # Half a minute a response: none is whole before its worker goes.
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=30", "rollout.sampling.max_tokens=900"]
    sizes = [*ONE, *slow, "model.max_positions=1024"]
    side = learner(make_run(*sizes, f"learner.max_lag={max_lag}"))
    side.publish(0)
    side.admission.admit(0)
    fast = ScriptedEngine(tokens_per_s=1e6)

    def silent(prompt: Any) -> list[int]:
        return [5] * 1000

    async with working(side, scripted_engine(side.run.rollout.engine, silent)) as engine:  # type: ignore[arg-type]
        await until(lambda: engine.tokens_drawn > 8)
    side.publish(1)
    async with working(side, scripted_engine(fast, silent)):
        (group,) = await side.take(1)
    found = {tuple(s.version for s in t.spans) for t in group.trajectories}
    assert tuple(versions) in found
    assert all(set(spans) <= set(versions) for spans in found)


async def test_a_response_that_takes_too_long_is_cut_kept_and_counted(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=50", "rollout.sampling.max_tokens=100"]
    side = learner(make_run(*slow, "rollout.request_timeout_s=0.2", *ONE))

    def silent(prompt: Any) -> list[int]:
        return [5] * 1000

    async with working(side, scripted_engine(side.run.rollout.engine, silent)):  # type: ignore[arg-type]
        side.publish(0)
        side.admission.admit(0)
        (group,) = await side.take(1)
        late = [t for t in group.trajectories if t.finish_reason == "timeout"]
        assert late and all(1 <= t.num_tokens < 100 for t in late)
        await until(lambda: any(w.timeouts >= len(late) for w in side.buffer.workers()))


async def test_a_groups_last_straggler_leaves_room_for_new_groups(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """Room for 8 responses, groups of 4: two groups at once while all are open, five where each has but one
    response to come."""
    side = learner(make_run(SCRIPTED, "learner.group_size=4", "learner.groups=8"))
    begun: list[int] = []
    tail, last = asyncio.Event(), asyncio.Event()

    class Straggling(Environment):
        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
            begun.append(ticket.number)
            want = await uninterrupted(side, ticket, build_engine(ScriptedEngine()))
            for response, completion in zip(responses, want, strict=True):
                response.add_drawn(completion)
            await tail.wait()
            for response in responses[:3]:
                response.ended = True
            await last.wait()
            responses[3].ended = True

    async with working(side, environment=Straggling(), limit=WorkerCapacity(8, 8, 4)):
        side.publish(0)
        side.admission.admit(0)
        await until(lambda: len(begun) == 2)
        await asyncio.sleep(0.3)
        assert len(begun) == 2
        tail.set()
        await until(lambda: len(begun) == 5)
        await asyncio.sleep(0.3)
        assert len(begun) == 5
        last.set()
        assert len(await side.take(8)) == 8


@pytest.mark.timeout(60)
@pytest.mark.parametrize("signal_number", [signal.SIGTERM, signal.SIGKILL])
async def test_sigterm_hands_on_tokens_and_sigkill_tickets_alone(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], signal_number: int
):
    slow = [SCRIPTED, "rollout.engine.tokens_per_s=60", "rollout.sampling.max_tokens=40", LONG]
    side = learner(make_run(*slow, "learner.groups=4", "buffer.claim_timeout_s=3"))
    side.publish(0)
    side.admission.admit(0)
    command = [sys.executable, "-m", "rollout", "--redis", side.url, "--run", side.run.name]
    process = subprocess.Popen([*command, "--id", "mortal"], stderr=subprocess.DEVNULL)
    try:
        tokens: list[int] = []
        await until(lambda: tokens.extend(w.tokens for w in side.buffer.workers()) or any(tokens))
        process.send_signal(signal_number)
        await asyncio.to_thread(process.wait)
        groups = len(side.buffer.take(100, 0.0))
        async with working(side, scripted_engine(ScriptedEngine(tokens_per_s=1e6))) as engine:
            taken = await side.take(12 - groups)
            resumed = [w.resumed for w in side.buffer.workers() if w.worker == "w"]
            await until(lambda: resumed.extend(w.resumed for w in side.buffer.workers()) or resumed)
            drawn = sum(t.num_tokens for g in taken for t in g.trajectories)
            assert (engine.tokens_drawn < drawn) == (signal_number == signal.SIGTERM)
        for group in taken:
            engine = scripted_engine(ScriptedEngine(tokens_per_s=1e6))
            want = await uninterrupted(side, group.ticket, engine)
            for trajectory, completion in zip(group.trajectories, want, strict=True):
                assert trajectory.response_ids.numpy().tolist() == completion.response_ids.tolist()
    finally:
        process.kill()
        process.wait()


def gaps(side: LearnerSide, groups: list[Group]) -> np.ndarray:
    """|learner's log-prob − behaviour log-prob| of every token."""
    samples = samples_of(SampledGroups(groups), side.run.learner.advantage, side.history, version=0)
    batch = pack_samples(samples)
    with torch.no_grad():
        recomputed, _ = token_logprobs(side.model, batch, side.run.rollout.sampling.temperature)
    return (recomputed - batch.behavior_logprobs).abs().numpy()


@pytest.mark.parametrize("format", ["bf16", "int8"])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_learner_recomputes_the_engines_log_probs(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], format: str, temperature: float
):
    settings = [f"rollout.format={format}", f"rollout.sampling.temperature={temperature}"]
    side = learner(make_run(*settings, "rollout.sampling.max_tokens=12", "learner.groups=16"))
    with torch.no_grad():
        for name, p in side.model.named_parameters():
            if is_quantized(name):  # so that rounding to bf16 changes nothing
                p.copy_(p.bfloat16())
    async with working(side):
        side.publish(0)
        side.admission.admit(0)
        found = gaps(side, await side.take(48))
        assert found.size > 200
        if format == "bf16":
            assert found.max() < 1e-4
        else:
            assert 1e-4 < found.mean() < 0.05
            assert found.max() < 0.5


async def test_recorded_log_probs_are_of_the_temperature_that_drew(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], make_ticket: Callable[..., Ticket]
):
    side = learner(make_run("rollout.format=bf16", "rollout.sampling.temperature=0.5"))
    async with working(side):
        side.publish(0)
        side.admission.admit(0)
        groups = await side.take(12)
        batch = pack_samples(
            samples_of(SampledGroups(groups), side.run.learner.advantage, side.history, version=0)
        )
        with torch.no_grad():
            at_one, _ = token_logprobs(side.model, batch, 1.0)
        # Recomputed at another temperature they differ by far more than any rounding.
        assert (at_one - batch.behavior_logprobs).abs().max() > 0.05


@pytest.mark.parametrize(
    "error",
    [None, redis.ResponseError("ERR The stream has exhausted"), redis.ConnectionError("closed")],
)
async def test_a_cancellation_beside_a_redis_answer_is_not_lost(error: Exception | None):
    """Be it a refusal, after which a worker waits for room, or the end of the connection."""

    async def answer() -> str:
        """As asyncio.wait_for before Python 3.12, where both come in one turn of the loop."""
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            if error:
                raise error from None
            return "answer"
        return "late"

    async def clean_up() -> str:
        """Calls go on working while a cancellation is being dealt with."""
        task = asyncio.current_task()
        assert task is not None
        try:
            task.cancel()
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            return await insist_async(Patience("redis://", 1.0), answered)
        return "not cancelled"

    async def answered() -> str:
        return "answer"

    task = asyncio.create_task(insist_async(Patience("redis://", 1.0), answer))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.create_task(clean_up()) == "answer"


@pytest.mark.timeout(60)
async def test_a_reward_that_hangs_costs_its_response_and_nothing_else(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], tmp_path: Path
):
    """Ticket 5's reward hangs, ticket 6's raises: all twelve groups arrive, from a worker that lives on."""
    file = tmp_path / "mine.py"
    file.write_text(
        "def reward(prompt, response, answer):\n"
        "    while prompt == HANGS: pass\n"
        "    return 1 / (prompt != RAISES)\n"
    )
    limit = f"reward.timeout_s={stretched(2.0)}"
    run = make_run(f'reward.path="{file}"', limit, "learner.group_size=2")
    task = build_task(run.task)
    prompts = [problem_at(task, n, run.seed).prompt for n in range(12)]
    file.write_text(f"HANGS, RAISES = {prompts[5]!r}, {prompts[6]!r}\n" + file.read_text())
    side = learner(run)
    async with working(side):
        side.publish(0)
        side.admission.admit(0)
        for group in await side.take(12):
            hangs = group.ticket.prompt == prompts[5]
            fails = hangs or group.ticket.prompt == prompts[6]
            for t in group.trajectories:
                assert t.reward == (0.0 if fails else 1.0)
                assert t.valid == (not fails)
                assert t.failure == ("timeout" if hangs else "exception" if fails else None)
        told = ("took too long", "raised ZeroDivisionError: division by zero, in ")
        beats = side.buffer.workers
        await until(lambda: any(status.failure.startswith(told) for status in beats()))


async def test_a_ticket_that_cannot_become_a_group_costs_itself_alone(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """A prompt too long for the model, or a reward that no group may have, once ended every worker in turn."""
    side = learner(make_run("rollout.engine.type=torch", *ONE))
    long = side.admission.ticket(0, 0)
    ids = Array.of(np.ones(300, np.int32))
    side.buffer.admit([msgspec.structs.replace(long, prompt_ids=ids)], 1)
    async with working(side):
        side.publish(0)
        side.admission.cursor = 1
        side.admission.admit(0)
        (group,) = await side.take(1)
        assert group.ticket.number > 0
        await until(lambda: side.buffer.quarantined_total() == 1)
        assert 0 not in side.buffer.open_tickets()


async def test_a_group_refused_at_its_commit_costs_itself_alone(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    side = learner(make_run(SCRIPTED, *ONE))

    class Rewarded(Environment):
        """Ends every response with a reward, that of ticket 0 too large."""

        async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
            for response in responses:
                response.add_given([1], VersionSpan(0, 0, "a"))
                response.ended = True
                response.score = Score(1e16 if ticket.number == 0 else 1.0, True)

    async with working(side, environment=Rewarded()):
        side.publish(0)
        side.admission.admit(0)
        (group,) = await side.take(1)
        assert group.ticket.number > 0
        await until(lambda: side.buffer.quarantined_total() == 1)


async def test_a_worker_of_weights_that_diverged_says_so_in_a_line(
    make_run: MakeRun,
    learner: Callable[[Run], LearnerSide],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr("rollout.worker.MOST_REFUSED", 2)
    side = learner(make_run("rollout.format=bf16", *ONE))
    with torch.no_grad():
        for p in side.model.parameters():
            p.fill_(1e30)
    side.publish(0)
    side.admission.admit(0)
    work = serve(
        side.url, side.run.name, "w", WeightSource(), lambda status: None, EndpointAddress(), 0.0
    )
    with pytest.raises(RecordError, match=r"gives up: 2 tickets .*: the policy has diverged"):
        await work


async def test_a_worker_whose_engine_refuses_a_setting_says_which(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], monkeypatch: pytest.MonkeyPatch
):
    """It ended with a traceback and code 1, with which a service manager starts it again for ever."""

    async def refuse(engine: Engine, weights: WeightVersion) -> None:
        raise ConfigError("rollout.engine.memory: there is less")

    side = learner(make_run("rollout.engine.type=torch", *ONE))
    monkeypatch.setattr(type(build_engine(side.run.rollout.engine)), "load_weights", refuse)
    side.publish(0)
    work = serve(
        side.url, side.run.name, "w", WeightSource(), lambda status: None, EndpointAddress(), 0.0
    )
    with pytest.raises(ConfigError, match=r"rollout\.engine\.memory: there is less"):
        await work


def of_another_model(side: LearnerSide, version: int) -> WeightVersion:
    run = override(side.run, "model.mlp=80")
    return VersionBuilder(run).build(initial_model(run), version)


async def test_weights_of_another_model_end_no_worker(
    make_run: MakeRun,
    learner: Callable[[Run], LearnerSide],
    caplog: pytest.LogCaptureFixture,
):
    side = learner(make_run("rollout.engine.type=torch", *ONE))
    async with working(side) as engine:
        side.publish(0)
        await until(lambda: engine.version == 0)
        publish(side.weight_server, of_another_model(side, 1))
        await until(lambda: "weights refused, version 0 goes on: version 1 " in caplog.text)
        side.publish(2)
        side.admission.admit(2)
        (group,) = await side.take(1)
        assert group.trajectories[0].spans[0].version == 2
        await until(lambda: any(status.refused_weights for status in side.buffer.workers()))


async def test_a_worker_whose_engine_refuses_the_first_weights_ends(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """The learner publishes no other version before it has groups: the worker would wait in silence."""
    side = learner(make_run("rollout.engine.type=torch", *ONE))
    weights = of_another_model(side, 0)
    model = weights.manifest.model | {"intermediate_size": 64}
    manifest = msgspec.structs.replace(weights.manifest, model=model)
    manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
    publish(side.weight_server, replace(weights, manifest=manifest))
    with pytest.raises(RecordError, match="gives up: the first weights were refused: version 0 "):
        await serve(
            side.url,
            side.run.name,
            "w",
            WeightSource(),
            lambda status: None,
            EndpointAddress(),
            0.0,
        )


async def test_a_worker_whose_first_weights_were_wrong_gives_up(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide], monkeypatch: pytest.MonkeyPatch
):
    """It would refuse the right ones for ever; the next worker begins with them."""
    monkeypatch.setattr("rollout.worker.MOST_REFUSED", 1)
    side = learner(make_run("rollout.engine.type=torch", *ONE))
    publish(side.weight_server, of_another_model(side, 0))
    swapped: list[int] = []
    work = asyncio.create_task(
        serve(
            side.url, side.run.name, "w", WeightSource(),
            lambda status: swapped.append(status["swaps"]), EndpointAddress(), 0.0,
        )
    )  # fmt: skip
    await until(lambda: any(swapped))
    side.publish(1)
    with pytest.raises(RecordError, match=r"gives up: 1 versions? in a row .*another model"):
        await work


async def test_a_spoilt_beginning_of_a_response_ends_no_worker(
    make_run: MakeRun, learner: Callable[[Run], LearnerSide]
):
    """Whoever may write partials once ended every worker in turn, as each handed the ticket on with them."""
    side = learner(
        make_run("rollout.engine.type=torch", "learner.groups=8", "learner.max_lag=0", LONG)
    )
    budget, vocabulary = side.run.rollout.sampling.max_tokens, side.tokenizer.vocab_size

    masked = Array.of([0] * (budget + 2), "uint8")
    kinds = [
        begun([2] * budget),
        begun([2] * (budget + 4)),
        begun([2] * 300, ended=True),
        begun([2, vocabulary]),
        begun([2, vocabulary], ended=True),
        begun([2] * (budget + 2), loss_mask=masked),
        begun([2], routes=Array.of([[[1, 2]]], "uint8")),
        begun([2], turns=1),
    ]
    side.admission.admit(0)
    foreign = WorkerBuffer(side.url, side.run.name, "foreign")
    claims = await foreign.claim(len(kinds), block_s=0.0)
    partials = [
        PartialGroup(ticket=c.ticket.number, responses=[kind] * c.ticket.group_size)
        for c, kind in zip(claims, kinds, strict=True)
    ]
    pairs = zip(claims, partials, strict=True)
    await foreign.release([msgspec.structs.replace(c, partial=p) for c, p in pairs])
    await foreign.close()
    async with working(side):
        side.publish(0)
        groups = await side.take(len(kinds))
    assert {g.ticket.number for g in groups} == {c.ticket.number for c in claims}
    ids = [t.response_ids.numpy() for g in groups for t in g.trajectories]
    assert max(found.max() for found in ids) < vocabulary
    assert max(map(len, ids)) <= budget + 2
