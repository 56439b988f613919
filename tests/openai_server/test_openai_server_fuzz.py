"""Whatever a request holds, the endpoint answers it, and the next sound request as if it had never been."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import aiohttp
import msgspec
import numpy as np
import pytest
from helpers.engines import initial_version
from helpers.openai_server.extreme_values import FLOATS, bodies
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from areal_q.config import Sampling, TorchEngine
from areal_q.errors import RecordError
from areal_q.messages import Group
from areal_q.tasks import build_tokenizer
from bench.records import make_group, make_ticket, make_trajectory
from rollout.engines import build_engine
from rollout.engines.base import Request
from rollout.engines.reference.async_engine import AsyncEngine
from rollout.openai_server.app import Endpoint
from rollout.openai_server.dialects import messages, responses
from rollout.openai_server.schema import MAX_STOP_IDS, ChatBody, CompletionBody, RewardBody, decoded

GOOD: dict[str, Any] = {"prompt": "1+2=", "max_tokens": 4, "seed": 5, "temperature": 1.0}


class Served:
    """An endpoint over real HTTP, and its engine."""

    def __init__(self, run: Any) -> None:
        self.loop = asyncio.new_event_loop()
        self.run = run
        self.engine: AsyncEngine = build_engine(TorchEngine(slots=16))  # type: ignore[assignment]

    async def start(self) -> None:
        run, tokenizer = self.run, build_tokenizer(self.run.model, self.run.task)
        await self.engine.start()
        await self.engine.load_weights(initial_version(run, 3))
        sampling = run.rollout.sampling
        self.endpoint = Endpoint(self.engine, tokenizer, run.name, None, sampling, "0", None)
        self.url = f"http://127.0.0.1:{await self.endpoint.start()}/v1"
        self.session = aiohttp.ClientSession()

    async def stop(self) -> None:
        await self.session.close()
        await self.endpoint.close()
        await self.engine.close()

    async def post(self, path: str, data: bytes, **headers: str) -> tuple[int, bytes]:
        heads = {"Content-Type": "application/json"} | headers
        async with self.session.post(self.url + path, data=data, headers=heads) as reply:
            return reply.status, await reply.read()

    def ask(self, path: str, body: Any, **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.loop.run_until_complete(self.post(path, data, **headers))

    def drawn(self) -> list[int]:
        """What a sound request is answered with."""
        status, said = self.ask("/completions", GOOD)
        assert status == 200, said
        return json.loads(said)["choices"][0]["token_ids"]

    @property
    def width(self) -> int:
        """Stop ids that each step compares a token of each row with."""
        return self.engine._stepper.batch.stops.shape[1]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    from areal_q.config import load

    run = load(None, ["model.layers=1", "model.width=16", "model.mlp=16", "model.max_positions=64"])
    one = Served(run)
    one.loop.run_until_complete(one.start())
    yield one
    one.loop.run_until_complete(one.stop())
    one.loop.close()


FUZZ = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def check_next(served: Served, expected: list[int]) -> None:
    assert served.drawn() == expected
    assert (served.width, served.engine.active) == (1, 0)


@FUZZ
@given(bodies(CompletionBody))
@example({"stop_token_ids": [2**63]})
@example({"top_k": 2**63})
@example({"stop_token_ids": list(range(100, 5000))})
@example({"stop_token_ids": list(range(MAX_STOP_IDS))})
@example({"seed": 2**63 - 1, "n": 16})
@example({"seed": -(2**63), "n": 16})
@example({"n": None, "stream": None, "stream_options": {"include_usage": None}})
def test_no_completion_request_reaches_the_next_one(served: Served, body: dict[str, Any]):
    expected = served.drawn()
    status, said = served.ask("/completions", GOOD | body)
    assert status in (200, 400, 404), said[:300]
    check_next(served, expected)


SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "1+2="}], "max_tokens": 4}
CHATS: dict[str, tuple[Any, dict[str, Any]]] = {
    "/chat/completions": (ChatBody, SAID),
    "/responses": (responses.ResponsesRequest, {"input": "1+2=", "max_output_tokens": 4}),
    "/messages": (messages.MessagesRequest, SAID),
}


@FUZZ
@given(st.sampled_from(sorted(CHATS)), st.data())
def test_no_chat_request_reaches_the_next_one(served: Served, path: str, data: st.DataObject):
    expected = served.drawn()
    kind, sound = CHATS[path]
    status, said = served.ask(path, sound | data.draw(bodies(kind)))
    assert status in (200, 400, 404), said[:300]
    check_next(served, expected)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_reach_the_next_request(served: Served, data: bytes):
    expected = served.drawn()
    for path in ("/completions", *CHATS):
        assert served.ask(path, data)[0] == 400
    check_next(served, expected)


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example:80"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
        {"Content-Type": "text/plain"},
        {"Content-Type": "multipart/form-data; boundary=x"},
    ],
)
def test_a_page_of_another_site_is_refused_without_a_token(served: Served, headers: dict[str, str]):
    status, said = served.ask("/completions", GOOD, **headers)
    assert (status, json.loads(said)["error"]["type"]) == (403, "permission_error")


@pytest.mark.parametrize(
    "headers",
    [{"Host": "localhost:9"}, {"Host": "[::1]:9"}, {"Origin": "http://localhost:3000"}, {}],
)
def test_a_program_of_this_machine_is_answered(served: Served, headers: dict[str, str]):
    assert served.ask("/completions", GOOD, **headers)[0] == 200


@settings(max_examples=300, deadline=None)
@given(st.floats() | st.sampled_from([*FLOATS, 1e15 * (1 + 2**-52)]), st.booleans())
def test_a_reward_that_is_taken_makes_a_sound_group(reward: float, part: bool):
    body = {"reward": 1.0, "parts": {"style": reward}} if part else {"reward": reward}
    try:
        data = msgspec.json.encode(body)
        taken = decoded(data, RewardBody)
    except RecordError:
        assert not abs(reward) <= 1e15
        return
    group_of(taken).validate()


@pytest.mark.parametrize(
    "parts",
    [{"": 1.0}, {"x" * 65: 1.0}, {"a b": 1.0}, {f"p{i}": 1.0 for i in range(33)}, {"x\n": 1.0}],
)
def test_parts_of_a_reward_are_few_and_have_short_names(parts: dict[str, float]):
    with pytest.raises(RecordError):
        decoded(msgspec.json.encode({"reward": 1.0, "parts": parts}), RewardBody)


def group_of(body: RewardBody) -> Group:
    answer = make_trajectory(0, [1], reward=body.reward or 0.0, reward_parts=body.parts)
    return make_group(make_ticket(group_size=1), trajectories=[answer])


def request(**changed: Any) -> Request:
    fields: dict[str, Any] = {
        "prompt_ids": np.array([1, 2], np.int32),
        "num_samples": 1,
        "sampling": Sampling(max_tokens=3),
        "seed": 1,
        "stop_ids": frozenset({0}),
    }
    return Request(**(fields | changed))


def test_a_request_that_no_tensor_holds_fails_alone(served: Served):
    """Admitted in one forward with a sound one, it once ended the engine's loop."""
    stepper = served.engine._stepper
    wrong = request(seed="no number")

    async def work() -> list[Any]:
        asked = [served.engine.generate(one) for one in (request(), wrong, request(seed=2))]
        return await asyncio.gather(*asked, return_exceptions=True)

    found = served.loop.run_until_complete(work())
    assert isinstance(found[1], RecordError)
    assert all(len(found[i][0].response_ids) >= 1 for i in (0, 2))
    assert stepper.active == 0 and served.drawn()


@pytest.mark.parametrize(
    "changed",
    [
        {"stop_ids": frozenset({2**63})},
        {"stop_ids": frozenset({-1})},
        {"stop_ids": frozenset(range(1000))},
        {"sampling": Sampling(top_k=2**63, max_tokens=3)},
        {"sampling": Sampling(max_tokens=2**40)},
    ],
)
def test_every_engine_refuses_numbers_beyond_tokens(served: Served, changed: dict[str, Any]):
    with pytest.raises(RecordError):
        served.loop.run_until_complete(served.engine.generate(request(**changed)))
