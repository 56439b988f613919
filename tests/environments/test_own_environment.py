"""Environments of a user's own: what they give is recorded and not learnt, and what fails is no reward."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.chain_models import byte_tokenizer
from helpers.commands import is_alive, stretched
from helpers.engines import responses
from helpers.openai_server.scripted import TEMPLATE
from helpers.paths import ROOT

from areal_q.checks.settings import preflight, without_effect
from areal_q.config import Chat, Run, Sampling, load
from areal_q.errors import RecordError, TaskError
from areal_q.messages import Array, Ticket, VersionSpan
from areal_q.tasks import CharTokenizer, Tokenizer, load_tokenizer
from rollout.engines.base import Completion, Request
from rollout.environments.base import Response, with_shared_prompt
from rollout.environments.engine_client import EngineClient
from rollout.environments.own_environment import OwnTurns
from rollout.environments.registry import build_environment

CHARS = CharTokenizer()
STEPS = """
class Environment:
    def reset(self, row):
        self.target = row["answer"]
        return row.get("first")

    def step(self, text):
        if text == self.target:
            return "", 1, True
        return text.strip(")") + ",", 0.25, False
"""
TOOLS = '''
class Environment:
    def __init__(self, unit="m"):
        self.unit, self.seen = unit, []

    async def measure(self, name: str, times: int = 1) -> list[str]:
        """Measures a thing.

        Args:
            name: of the thing
        """
        self.seen.append(name)
        return [f"{len(name)} {self.unit}"] * times

    def reward(self, response, answer):
        return {"reward": float(answer in response), "seen": len(self.seen), "last": self.seen[-1]}
'''


class Saying:
    """An engine that draws what `answer` says to the text that it is given: up to a stop, or its end token."""

    version = 3

    def __init__(self, tokenizer: Tokenizer, answer: Callable[[str], str | Awaitable[str]]) -> None:
        self.tokenizer, self.answer = tokenizer, answer
        self.drawn: list[tuple[list[int], list[int]]] = []

    async def generate(self, request: Request, on_token: Any, on_response: Any) -> list[Completion]:
        prompt = request.prompt_ids.tolist()
        text = self.answer(self.tokenizer.decode(prompt))
        text = text if isinstance(text, str) else await text
        ids = self.tokenizer.encode(text)
        stops = [s for s in request.sampling.stop if isinstance(s, str)]
        if not text.endswith(tuple(stops) or ("\0",)):
            ids.append(self.tokenizer.eos_id)
        whole, ids = ids, ids[: request.sampling.max_tokens]
        self.drawn.append((prompt, ids))
        done = Completion(
            response_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), -0.5, np.float32),
            spans=[VersionSpan(3, len(ids), "ab")],
            finish_reason="stop" if ids == whole else "length",
        )
        on_response(0, done)
        return [done]


@pytest.fixture
def world(tmp_path: Path, make_ticket: Callable[..., Ticket]) -> Callable[..., "World"]:
    return lambda code, says, *settings, **asked: World(
        tmp_path, make_ticket, code, says, settings, asked
    )


class World:
    """An environment in a file, an engine, and a ticket. With a model, both talk in its chat format."""

    def __init__(
        self,
        path: Path,
        make_ticket: Callable[..., Ticket],
        code: str,
        says: Callable[[str], Any],
        settings: Sequence[str],
        asked: dict[str, Any],
    ) -> None:
        (path / "mine.py").write_text(code)
        table = f'type="python", path="{path}/mine.py", max_given_tokens=64'
        own = f"rollout.environment={{{table}}}"
        self.chat = "task.type=jsonl" in settings
        self.tokenizer: Tokenizer = CHARS
        if self.chat:
            byte_tokenizer(template=TEMPLATE).save_pretrained(path)
            self.tokenizer = load_tokenizer(path, Chat())
            settings = [
                *settings, "task.path=none", "task.template=chat",
                f'model={{type="pretrained", path="{path}"}}',
            ]  # fmt: skip
        self.run: Run = load(None, [own, *settings])
        self.engine: Any = Saying(self.tokenizer, says)
        prompt = asked.setdefault("prompt", "1+2=")
        asked.setdefault("group_size", 1)
        asked.setdefault("sampling", Sampling(max_tokens=400, stop=(")",) if not self.chat else ()))
        ids = Array.of(self.tokenizer.encode_prompt(prompt), "int32")
        self.ticket = make_ticket(prompt_ids=ids, **asked)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[OwnTurns]:
        environment = build_environment(self.run, EngineClient(self.engine, self.tokenizer))
        assert isinstance(environment, OwnTurns)
        await environment.start()
        try:
            yield environment
        finally:
            await environment.close()

    async def play(self) -> list[Response]:
        async with self.open() as environment:
            return await self.played(environment)

    async def played(self, environment: OwnTurns) -> list[Response]:
        found = await responses(environment, self.ticket)
        assert all(r.ended and len(r.ids) == len(r.mask) == len(r.logprobs) for r in found)
        return found


def by_turn(*turns: str) -> Callable[[str], str]:
    """Says the turn whose number is that of the commas in what it is given."""
    return lambda seen: turns[seen.count(",")]


def shown(response: Response) -> tuple[str, str]:
    return CHARS.decode(response.ids), "".join(map(str, response.mask))


@pytest.mark.parametrize(
    ("turns", "given", "text", "mask", "reward", "reason"),
    [
        (("3",), {}, "3", "11", 1.0, "stop"),
        (("2)", "3"), {}, "2)2,3", "110011", 1.25, "stop"),
        (("2)", "4", "3"), {}, "2)2,44,3", "1100110011", 1.5, "stop"),
        (("2)", "4", "5"), {"turns": 2}, "2)2,4", "110011", 0.5, "stop"),
        (("2)", "444444", "3"), {"tokens": 5}, "2)2,444", "1100111", 0.5, "length"),
        (("2)", "444", "3"), {"room": 3}, "2)2,444", "11001111", 0.5, "length"),
    ],
)
async def test_turns_of_text_append_and_rewards_add_up(
    world: Callable[..., World], turns, given, text, mask, reward, reason
):
    limits = f"rollout.environment.max_turns={given.get('turns', 9)}"
    room = f"rollout.environment.max_given_tokens={given.get('room', 9)}"
    sampling = Sampling(max_tokens=given.get("tokens", 20), stop=(")",))
    here = world(STEPS, by_turn(*turns), limits, room, answer="3", sampling=sampling)
    (response,) = await here.play()
    assert shown(response) == (text, mask)
    assert response.score is not None
    assert (response.score.reward, response.score.correct) == (reward, reward >= 1)
    assert response.finish_reason == reason
    for (
        prompt,
        drawn,
    ) in here.engine.drawn:  # each turn is drawn after all that is recorded before it
        whole = response.context(here.ticket)
        assert whole[: len(prompt) + len(drawn)] == prompt + drawn
        last = len(prompt) + len(drawn) - 1 - (len(whole) - len(response.ids))
        right = CHARS.decode(drawn[:-1]) == "3"
        assert response.turn_rewards.pop(last) == (1 if right else 0.25)
    assert not response.turn_rewards
    # A response ends with the stop of its last turn, not with that of its first.
    assert response.text(CHARS, sampling) == text


@pytest.mark.parametrize(
    ("asked", "given"),
    [
        ("problem", "problem['prompt']"),
        ("*, seed=None, options=None", "int(seed > 0)"),
        ("seed=None, episode_id=None, **others", "others['prompt']"),
        ("**all", "all['row']['prompt']"),
        ("*args", "args[0]['prompt']"),
        ("problem, /", "problem['prompt']"),
        ("", "'5-'"),
    ],
)
async def test_reset_asks_in_the_ways_of_other_libraries(
    world: Callable[..., World], asked: str, given: str
):
    """Gymnasium's, OpenEnv's and TRL's were refused, or failed in each episode."""
    code = f"class Environment:\n    def reset(self, {asked}): return str({given})\n"
    here = world(
        f"{code}    def step(self, text): return '', 1.0, True\n", by_turn("3"), prompt="1+2="
    )
    (response,) = await here.play()
    assert response.score and response.score.reward == 1.0 and response.prompt


@pytest.mark.parametrize(
    ("settings", "said"),
    [("{a=1, b=1}", "unexpected keyword argument 'b'"), ("{}", "missing a required argument: 'a'")],
)
def test_settings_that_a_class_does_not_take_are_said_at_once(
    tmp_path: Path, settings: str, said: str
):
    """Each episode failed of them."""
    (tmp_path / "mine.py").write_text(
        "class Environment:\n    def __init__(self, a): pass\n    def step(self, text): pass\n"
    )
    table = f'type="python", path="{tmp_path}/mine.py", max_given_tokens=64, settings={settings}'
    own = f"rollout.environment={{{table}}}"
    with pytest.raises(TaskError, match=f"rollout.environment.settings: .*{said}"):
        preflight(load(None, [own]))


def test_rewards_that_an_environment_replaces_are_said(tmp_path: Path):
    (tmp_path / "mine.py").write_text("class Environment:\n    def step(self, text): pass\n")
    own = f'rollout.environment={{type="python", path="{tmp_path}/mine.py", max_given_tokens=64}}'
    length = "reward.length=0.5"
    for environment in (own, "rollout.environment.type=external"):
        said = without_effect(load(None, [environment, length]))
        assert any("reward.length" in sentence for sentence in said)
    assert without_effect(load(None, [length])) == []


async def test_what_reset_gives_follows_the_prompt(world: Callable[..., World]):
    columns = '{"first": "7-", "answer": "3"}'
    here = world(STEPS, by_turn("3"), columns=columns, answer="3", group_size=2)
    asked, responses = with_shared_prompt(here.ticket, await here.play())
    assert CHARS.decode(asked.prompt_ids.numpy().tolist()) == "1+2=7-"
    assert [shown(r) for r in responses] == [("3", "11")] * 2


async def test_tools_are_called_in_the_format_of_the_model(
    world: Callable[..., World],
):
    call = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
    turns = [
        "é " + call % ("measure", '{"name": "oak", "times": 2}') + call % ("measure", '{"name": "é"}'),
        call % ("weigh", "{}") + call % ("measure", '{"name": 3}'),
        "It is 3 ft",
    ]  # fmt: skip

    def answer(seen: str) -> str:
        return turns[seen.count("<|im_start|>assistant") - 1]

    here = world(
        TOOLS, answer, "task.type=jsonl", "rollout.environment.settings.unit=ft",
        "rollout.environment.max_given_tokens=2000", answer="3 ft", prompt="how long?",
        sampling=Sampling(max_tokens=2000),
    )  # fmt: skip
    (response,) = await here.play()
    decode = here.tokenizer.decode
    assert response.prompt is not None
    told = decode(response.prompt)
    assert '"name": "measure"' in told and '"description": "of the thing"' in told
    given = [decode([i]) for i, m in zip(response.ids, response.mask, strict=True) if not m]
    said = "".join(given)
    assert '["3 ft","3 ft"]' in said and '["1 ft"]' in said
    assert "error: no tool 'weigh'; there are measure" in said
    assert "error: measure: name = 3: must be text" in said
    drawn = [i for i, m in zip(response.ids, response.mask, strict=True) if m]
    assert drawn == [i for _, ids in here.engine.drawn for i in ids]
    assert [prompt for prompt, _ in here.engine.drawn][-1] == response.context(here.ticket)[
        : -len(here.engine.drawn[-1][1])
    ]
    score = response.score
    assert score is not None and (score.reward, score.parts, score.notes) == (
        1.0, {"seen": 2.0}, {"last": "é"},
    )  # fmt: skip


FAILS = """
import os, signal, sys, time
from areal_q.errors import RewardUnavailable

class Environment:
    def __init__(self):
        self.row = None

    def reset(self, row):
        self.fail(row["prompt"])

    def step(self, text):
        self.fail(text)
        return "1,", 1.0, text == "8"

    def fail(self, text):
        if text.startswith("0"): sys.exit(0)
        if text.startswith("1"): raise KeyError("k")
        if text.startswith("2"): time.sleep(60)
        if text.startswith("3"): os._exit(0)
        if text.startswith("4"): raise RewardUnavailable("no sandbox")
        if text.startswith("5"): self.row = bytearray(1 << 33)
        if text.startswith("6"): os.kill(os.getpid(), signal.SIGKILL)
        if text.startswith("7"): signal.pthread_sigmask(signal.SIG_BLOCK, range(1, 32)); time.sleep(60)
"""
CAUSES = {
    "0": ("exception", "mine.py:17"), "1": ("exception", "mine.py:18"),
    "2": ("timeout", "too long"), "3": ("killed", "ended"),
    "4": ("unavailable", "no sandbox"), "5": ("killed", "MemoryError"), "6": ("killed", "ended"),
    "7": ("timeout", "too long"),
}  # fmt: skip


def limits() -> tuple[str, str]:
    """Returns settings under which each failure shows soon, and only that one on a busy machine."""
    timeout_s = f"rollout.environment.timeout_s={stretched(1.5)}"
    return timeout_s, "rollout.environment.memory_mib=512"


async def test_what_is_far_too_long_is_not_tokenised(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
):
    """A page of some MB, say: that takes seconds, in which the worker keeps no lease."""
    long = "class Environment:\n    def step(self, text):\n        return '9' * 8_000_000, 0.0, False\n"
    here = world(long, by_turn("3"))
    most = 0
    encode = here.tokenizer.encode

    def seen(text: str) -> list[int]:
        nonlocal most
        most = max(most, len(text))
        return encode(text)

    monkeypatch.setattr(here.tokenizer, "encode", seen)
    (response,) = await here.play()
    assert response.finish_reason == "length" and most < 1000


@pytest.mark.parametrize("begins", [True, False])
@pytest.mark.parametrize("digit", CAUSES)
async def test_a_failure_is_a_cause_and_no_reward(
    world: Callable[..., World], digit: str, begins: bool
):
    """As the episode begins, and in its second turn."""
    here = world(
        FAILS, by_turn("9", "8" if begins else digit), *limits(),
        prompt=f"{digit if begins else 9}+1=",
    )  # fmt: skip
    async with here.open() as environment:
        (response,) = await here.played(environment)
        cause, said = CAUSES[digit]
        assert response.score is not None
        assert (response.score.valid, response.score.failure) == (False, cause)
        assert said in environment.failure
    assert response.drawn and response.trajectory(0, response.score).failure == cause


async def test_a_failure_counts_as_0_where_the_settings_say_so(
    world: Callable[..., World],
):
    here = world(FAILS, by_turn("1"), 'reward.zero_on=["exception"]', prompt="0+1=")
    (response,) = await here.play()
    score = response.score
    assert score is not None and (score.valid, score.reward) == (True, 0.0)


async def test_a_killed_process_costs_its_own_episode_alone(world: Callable[..., World]):
    """Four episodes are open when one process is killed; then the one that forks them."""
    code = """
import os
class Environment:
    def step(self, text):
        return f"{os.getpid()},", 1.0, "4" in text
"""
    waits: list[asyncio.Event] = []
    pids: list[int] = []
    begun = asyncio.Event()

    def answer(seen: str) -> Any:
        if seen.count(",") < 1:
            return "3"

        async def later() -> str:
            pids.append(int(seen.rpartition("=")[2].strip(",")[1:]))
            waits.append(asyncio.Event())
            if len(waits) == 4:
                begun.set()
            await waits[-1].wait()
            return "4"

        return later()

    here = world(code, answer, group_size=4)
    async with here.open() as environment:
        for victim in ("episode", "loader"):
            waits.clear()
            pids.clear()
            begun.clear()
            playing = asyncio.create_task(here.played(environment))
            await begun.wait()
            assert len({*pids}) == 4
            loader = psutil.Process(pids[0]).parent()
            supervisor = loader.parent() if loader else None
            assert loader and supervisor
            os.kill(pids[2] if victim == "episode" else loader.pid, signal.SIGKILL)
            while victim == "loader" and supervisor.status() != "zombie":
                await asyncio.sleep(0.02)  # it ends them all first
            for event in waits:
                event.set()
            failed = [r.score.failure for r in await playing if r.score is not None]
            assert sorted(map(str, failed)) == (
                ["None"] * 3 + ["killed"] if victim == "episode" else ["killed"] * 4
            )
        waits.clear()
        begun.clear()
        playing = asyncio.create_task(here.played(environment))
        await begun.wait()
        processes = [psutil.Process(pid) for pid in pids[-4:]]
        for event in waits:
            event.set()
        assert all(r.score is not None and r.score.valid for r in await playing)
    assert not any(process.is_running() for process in processes)


async def test_what_an_episode_leaves_behind_ends_with_it(
    world: Callable[..., World], tmp_path: Path
):
    """At the latest as the next one begins."""
    code = f"""
import subprocess
class Environment:
    def step(self, text):
        with open({str(tmp_path / "pids")!r}, "a") as file:
            print(subprocess.Popen(["sleep", "600"]).pid, file=file)
        return "", 1.0, True
"""
    here = world(code, by_turn("9"))
    async with here.open() as environment:
        await here.played(environment)
        first = int((tmp_path / "pids").read_text().split()[0])
        while is_alive(os.getpgid(first)):
            await asyncio.sleep(0.02)
        assert is_alive(first)
        await here.played(environment)
        while is_alive(first):
            await asyncio.sleep(0.02)


async def test_a_cancelled_ticket_ends_its_episodes(world: Callable[..., World]):
    code = "import time\nclass Environment:\n    def step(self, text): time.sleep(600)\n"
    here = world(code, by_turn("3"), group_size=3)
    async with here.open() as environment:
        task = asyncio.create_task(here.played(environment))
        mine = psutil.Process()

        def episodes() -> list[psutil.Process]:
            loaders = [p for c in mine.children() for p in c.children()]
            return [p for loader in loaders for p in loader.children() if p.status() != "zombie"]

        while len(episodes()) < 3:
            await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.wait([task])
        while episodes():
            await asyncio.sleep(0.02)
        assert task.cancelled() and all(loader.is_running() for loader in mine.children())


async def test_a_file_may_use_torch_as_it_is_loaded(
    world: Callable[..., World], monkeypatch: pytest.MonkeyPatch
):
    """Every episode waited for threads of OpenMP that its fork does not have, and took too long."""
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    code = """
import torch
ONES = torch.ones(1 << 20)
LOADED = ONES.exp().sum()
class Environment:
    def step(self, text): return "", float(ONES.exp().sum() / LOADED), True
"""
    wait = f"rollout.environment.timeout_s={stretched(10)}"
    (response,) = await world(code, by_turn("3"), wait).play()
    assert response.score and response.score.reward == pytest.approx(1.0)


async def test_each_episode_draws_its_own_random_numbers(world: Callable[..., World]):
    code = """
import random
class Environment:
    def reset(self, seed): self.seed = seed
    def step(self, text): return "", random.randrange(10**6) + (0 if self.seed else 10**7), True
"""
    here = world(code, by_turn("3"), group_size=3)
    async with here.open() as environment:
        once, again = await here.played(environment), await here.played(environment)
    rewards = [[r.score.reward for r in some if r.score] for some in (once, again)]
    assert rewards[0] == rewards[1] and len({*rewards[0]}) == 3 and max(rewards[0]) < 10**7


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("def Environment(): pass", "an environment is a class"),
        ("class Environment: pass", "has neither `step` nor a tool"),
        ("class Environment:\n    def f(self, a: int): pass", "mine.py:2: f: a tool needs a docstring"),
        ('class Environment:\n    def f(self, a):\n        "d"', "mine.py:2: f: its parameter a needs"),
        ('class Environment:\n    def f(self, *a: int):\n        "d"', "cannot be given by name"),
        ('class Environment:\n    def f(self, a: object):\n        "d"', "cannot be described"),
        ("class Environment:\n    def step(self, text): pass\n    def reset(self, row, hm): pass", "hm"),
        ("import nothing_of_that_name", "mine.py:1: ModuleNotFoundError"),
        ("x = 1", "no function 'Environment'"),
        (TOOLS, "mine.py has tools: there is no chat template here"),
    ],
)  # fmt: skip
async def test_what_is_wrong_with_a_class_is_said_at_the_start(
    world: Callable[..., World], code: str, said: str
):
    with pytest.raises(TaskError) as refused:
        await world(code, by_turn("3")).play()
    assert said in str(refused.value) and "\n" not in str(refused.value)


async def test_tools_and_beginnings_without_room_are_refused(world: Callable[..., World]):
    here = world(TOOLS, by_turn("3"), "task.type=jsonl", "rollout.environment.max_given_tokens=20")
    with pytest.raises(TaskError, match="max_given_tokens = 20: the description of its tools"):
        await here.play()
    here = world(
        STEPS, by_turn("3"), "rollout.environment.max_given_tokens=1", columns='{"first":"77"}'
    )
    with pytest.raises(ExceptionGroup) as refused:
        await here.play()
    assert isinstance(refused.value.exceptions[0], RecordError)


async def test_gymnasiums_five_values_are_taken(world: Callable[..., World]):
    code = """
class Environment:
    def reset(self, seed): return "5-", {"info": 1}
    def step(self, text): return 7, 0.5, False, text == "2", {"depth": 3, "why": "so", "array": [1]}
"""
    (response,) = await world(code, lambda seen: "2" if "7" in seen else "1").play()
    assert response.prompt == CHARS.encode("1+2=5-") and shown(response) == ("172", "11011")
    score = response.score
    assert score is not None and (score.reward, score.parts, score.notes) == (
        1.0, {"depth": 3.0}, {"why": "so"},
    )  # fmt: skip


async def test_the_tools_of_the_page_are_played(world: Callable[..., World]):
    page = (ROOT / "docs" / "environments.md").read_text("utf-8")
    code = page.partition("```python\n# notes.py\n")[2].partition("```")[0]
    call = '<tool_call>\n{"name": "look_up", "arguments": {"name": "ouzo"}}\n</tool_call>'
    says = lambda seen: call if seen.count("assistant\n") == 1 else "It is a drink."  # noqa: E731
    room = "rollout.environment.max_given_tokens=1024"
    here = world(code, says, "task.type=jsonl", room, prompt="Ouzo?", answer="a drink")
    (response,) = await here.play()
    text = here.tokenizer.decode(response.ids)
    assert "tool\na drink<|im_end|>" in text and "no such" not in text
    score = response.score
    assert score is not None and (score.reward, score.parts) == (1.0, {"looked_up": 1.0})
