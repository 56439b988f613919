"""Whatever an agent does to its episode over HTTP, that episode alone is lost, and its group is token-exact."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
from helpers.engines import initial_version
from helpers.openai_server.extreme_values import bodies
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from areal_q.config import Run, dump_toml, load
from areal_q.messages import Group
from areal_q.system.ports import free_ports
from areal_q.tasks import build_task, build_tokenizer
from buffer.redis_store import LearnerBuffer
from buffer.redis_store.local_server import RedisServer
from buffer.weight_sync import WeightServer, WeightSource
from learner.data.admission import Admission
from learner.measure.fidelity import FidelityMeter
from rollout.build import EndpointAddress, serve
from rollout.openai_server.schema import BeginEpisode, ChatBody, CompletionBody, RewardBody

SETTINGS = [
    "model.layers=1", "model.width=16", "model.heads=2", "model.kv_heads=1", "model.mlp=16",
    "model.max_positions=64", "task.digits=1", "task.heldout=20", "learner.groups=1", "learner.minibatches=1",
    "learner.group_size=3", "learner.fidelity.share=1", "rollout.sampling.max_tokens=6",
    "rollout.environment.type=external", "learner.microbatch_tokens=48", "name=hostile",
]  # fmt: skip
"""The run's name is no other test's, which may have left groups in the same Redis."""
LEAVES_S = 0.05
"""Seconds after which an agent that does not wait for its answer leaves"""


class Cluster:
    """A worker as `areal-q rollout` runs it, with all that a learner is to it, and agents of it."""

    def __init__(self, run: Run, redis_url: str, sockets: Path) -> None:
        self.run, self._redis_url = run, redis_url
        self.tokenizer = build_tokenizer(run.model, run.task)
        self.buffer = LearnerBuffer(redis_url, run.name)
        self.weight_server = WeightServer(f"ipc://{sockets}/announce", f"ipc://{sockets}/fetch")
        self.buffer.publish_run(dump_toml(run), self.weight_server.endpoints._asdict())
        version = initial_version(run)
        self.weight_server.publish(version)
        self.meter = FidelityMeter(run.learner, run.rollout.format)
        self.meter.remember(version)
        task = build_task(run.task)
        self._admission = Admission(run, task, self.tokenizer, self.buffer, 0, set())
        self.tickets = 0
        self.at = f"127.0.0.1:{free_ports(1)[0]}"

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        address = EndpointAddress(self.at)
        self.worker = asyncio.create_task(
            serve(self._redis_url, self.run.name, "w", WeightSource(), lambda _: None, address, 0.0)
        )
        try:
            yield
        finally:
            self.worker.cancel()
            await asyncio.gather(self.worker, return_exceptions=True)
            self.weight_server.close()
            self.buffer.close()

    async def post(self, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """Returns status and answer, as soon as there is an endpoint."""
        data = body if isinstance(body, bytes) else json.dumps(body or {}).encode()
        heads = {"Content-Type": "application/json"} | headers
        while True:
            assert not self.worker.done(), self.worker.exception()
            with suppress(aiohttp.ClientConnectorError):
                async with aiohttp.request(
                    "POST", f"http://{self.at}/v1{path}", data=data, headers=heads
                ) as reply:
                    return reply.status, json.loads((await reply.text()).partition("\n")[0])
            await asyncio.sleep(0.05)

    async def begin(self, body: Any = None) -> dict[str, Any]:
        status, episode = await self.post("/episodes", body)
        return episode if status == 200 else await self.begin()

    def issue(self) -> None:
        """Admits the one ticket that is open now."""
        self._admission.issue([self.tickets], version=0)
        self.tickets += 1

    async def play(self) -> None:
        """Plays an episode as an agent should."""
        episode = await self.begin({"timeout_s": 60})
        prompt, heads = episode["prompt"], {"X-Episode": episode["id"]}
        status, said = await self.post("/completions", {"prompt": prompt, "max_tokens": 2}, **heads)
        assert status == 200, said
        body = {"reward": 0.5, "parts": {"sound": 1.0}}
        assert (await self.post(f"/episodes/{episode['id']}/reward", body))[0] == 200

    async def leave(self, path: str, body: Any, sent: float, heads: dict[str, str]) -> None:
        """Sends that share of a request, and hangs up without a word."""
        data = json.dumps(body).encode()
        lines = [f"POST /v1{path} HTTP/1.1", f"Host: {self.at}", f"Content-Length: {len(data)}"]
        lines += [f"{name}: {value}" for name, value in heads.items()]
        whole = "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode() + data
        at = urlsplit(f"http://{self.at}")
        reader, writer = await asyncio.open_connection(at.hostname, at.port)
        writer.write(whole[: round(sent * len(whole))])
        with suppress(TimeoutError):
            await asyncio.wait_for(reader.read(1), LEAVES_S)
        writer.transport.abort()


Act = tuple[str, str, Any]
"""What an agent does: how, to which path, with which body or bytes"""
TURNS = st.sampled_from(["/completions", "/chat/completions"])
FIELDS = {"/completions": bodies(CompletionBody), "/chat/completions": bodies(ChatBody)}
ACTS: st.SearchStrategy[Act] = st.one_of(
    TURNS.flatmap(lambda path: st.tuples(st.just("asks"), st.just(path), FIELDS[path])),
    st.tuples(st.just("rewards"), st.just("/reward"), bodies(RewardBody) | st.just({"reward": 1})),
    st.tuples(st.just("babbles"), TURNS | st.just("/reward"), st.binary(max_size=60)),
    st.tuples(st.just("leaves"), TURNS, st.sampled_from([0.1, 0.9, 1.0])),
    st.tuples(st.just("streams and leaves"), TURNS, st.just(1.0)),
    st.just(("gives up", "", None)),
)


async def act(cluster: Cluster, episode: dict[str, Any], acts: Act) -> bool:
    """Does it to the episode; returns whether that ended it."""
    how, path, body = acts
    heads = {"X-Episode": episode["id"]}
    sound = {
        "/completions": {"prompt": episode["prompt"]},
        "/chat/completions": {"messages": [{"role": "user", "content": episode["prompt"]}]},
    }
    if path == "/reward":
        path = f"/episodes/{episode['id']}/reward"
    if how == "gives up":
        async with aiohttp.request("DELETE", f"http://{cluster.at}/v1/episodes/{episode['id']}"):
            return False
    if "leaves" in how:
        asked = sound[path] | {"stream": "streams" in how}
        await cluster.leave(path, asked, body, heads)
        return False
    if how == "asks":
        body = sound[path] | body
    status, said = await cluster.post(path, body, **heads)
    assert status in (200, 400, 404), said
    # One that failed before it drew anything is offered again.
    return how == "rewards" and status == 200 and said["tokens"] > 0


async def example(cluster: Cluster, begin: Any, acts: list[Act]) -> Group:
    """One agent does `acts`, sound ones play what is left; returns the group that comes of it."""
    cluster.issue()
    episode = await cluster.begin(begin)
    ended = [await act(cluster, episode, one) for one in acts]
    if not any(ended):  # else the others would wait until it counts as silent
        url = f"http://{cluster.at}/v1/episodes/{episode['id']}"
        async with aiohttp.request("DELETE", url):
            pass
    for _ in range(cluster.run.learner.group_size - any(ended)):
        await cluster.play()
    groups: list[Group] = []
    while not groups:
        groups = await asyncio.to_thread(cluster.buffer.take, 1, 0.2)
        assert not cluster.worker.done() and cluster.buffer.quarantined_total() == 0
    assert cluster.buffer.quarantined_total() == 0
    return groups[0]


@pytest.fixture(scope="module")
def cluster(
    redis_server: RedisServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[asyncio.AbstractEventLoop, Cluster]]:
    loop = asyncio.new_event_loop()
    made = Cluster(load(None, SETTINGS), redis_server.url, tmp_path_factory.mktemp("s"))
    stack = AsyncExitStack()
    loop.run_until_complete(stack.enter_async_context(made.working()))
    yield loop, made
    loop.run_until_complete(stack.aclose())
    loop.close()


@pytest.mark.timeout(300)
@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    # Tried again, a smaller example would meet what others left in the cluster, and fail for that.
    phases=[Phase.explicit, Phase.generate],
)
@given(bodies(BeginEpisode) | st.just({}), st.lists(ACTS, min_size=1, max_size=4))
def test_a_hostile_agent_loses_its_own_episode_alone(
    cluster: tuple[asyncio.AbstractEventLoop, Cluster], begin: dict[str, Any], acts: list[Act]
):
    """Its group holds what the model drew, as the learner's own forward sees it, and its rewards are taken as
    sent or counted by their cause; those of the others are theirs."""
    loop, made = cluster
    group = loop.run_until_complete(example(made, begin, acts))
    assert group.ticket.number == made.tickets - 1
    theirs = [t for t in group.trajectories if t.reward_parts.get("sound") != 1.0]
    assert len(theirs) <= 1
    assert all(t.valid and t.reward == 0.5 for t in group.trajectories if t not in theirs)
    assert all(t.valid or t.failure for t in theirs)
    assert made.meter.measure([group])["fidelity/gap_mean_nats"] < 1e-3
