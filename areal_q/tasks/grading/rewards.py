"""The reward of a response: a sum of the task's score, the format and the length, weighted by the settings.

    reward = correct · score + format · (1 or 0) + length · (unused share, if correct) + overlong penalty

Fast built-in graders run in the worker. Slow ones and those in a user's file run in processes of their own
(isolated_reward.py). Imports no torch.
"""

import asyncio
import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import msgspec
import tomli_w

from areal_q.config import (
    External,
    Mix,
    Overlong,
    Python,
    PythonEnvironment,
    PythonOrder,
    RewardConfig,
    Run,
    Sampling,
    TaskConfig,
)
from areal_q.errors import ConfigError, RecordError, installing
from areal_q.messages.trajectories import FailureCause
from areal_q.plugins import digest_of, parted
from areal_q.tasks.base import Columns, Completed, Grader, Problem, Score
from areal_q.tasks.datasets.gsm8k import ends_with_number
from areal_q.tasks.grading.boxed import last_boxed
from areal_q.tasks.grading.graders import GRADERS, check_extra
from areal_q.tasks.grading.isolated_reward import Isolated
from areal_q.tasks.grading.own_reward import load_reward
from areal_q.tasks.stops import stop_strings

_INSIDE = r"[^<]*(?:<(?!/?think>|/?answer>)[^<]*)*"
"""Text without any of the four tags"""
_THOUGHT = re.compile(rf"\s*<think>{_INSIDE}</think>\s*<answer>{_INSIDE}</answer>\s*")

STYLES: dict[str, Callable[[str], bool]] = {
    "boxed": lambda text: bool(last_boxed(text)),
    "think": lambda text: _THOUGHT.fullmatch(text) is not None,
    "hash": ends_with_number,
}
"""Formats that a response can be in; the key is `reward.style`"""


_JUDGE_S = 3600.0
"""Seconds after which a response is given up that waits for a judge's connection to be free"""
Opinion = Callable[[Problem, str], bool | None]
"""Says whether a response is right; None if it cannot tell"""


class Reward(Protocol):
    """The reward function of a worker. It returns the scores of responses to one problem, in their order, and
    never raises once it has started."""

    @property
    def failure(self) -> str:
        """How the newest response failed that could not be scored; "" while none did."""
        ...

    async def start(self) -> None:
        """Raises TaskError or ConfigError for a reward that cannot be loaded."""
        ...

    async def __call__(self, problem: Problem, responses: Sequence[Completed]) -> list[Score]: ...
    async def close(self) -> None: ...


class InlineReward:
    """A fast grader, which runs in the worker itself. One that compares the whole response does not see any of
    the stop strings `stops` at its end, but the format is judged with it, since `</answer>` may be one."""

    def __init__(
        self, grader: Grader, cfg: RewardConfig, max_tokens: int, stops: Sequence[str] = ()
    ) -> None:
        self._grader, self._cfg, self._max_tokens = grader, cfg, max_tokens
        self._stops = stops if grader.whole else ()
        self.failure = ""

    async def start(self) -> None:
        pass

    async def __call__(self, problem: Problem, responses: Sequence[Completed]) -> list[Score]:
        return [
            _shaped(
                self._grader.score(problem, _without_stop(response.text, self._stops)),
                response,
                self._cfg,
                self._max_tokens,
            )
            for response in responses
        ]

    async def close(self) -> None:
        pass


class IsolatedReward(Isolated):
    """A slow grader or a user's own, which runs in processes that are killed after `reward.timeout_s`.
    `zero_on` are the failures that the response itself causes."""

    def __init__(
        self,
        source: tuple[str, str, str],
        cfg: RewardConfig,
        max_tokens: int,
        zero_on: tuple[FailureCause, ...] = (),
    ) -> None:
        super().__init__(source, cfg.timeout_s, cfg.processes, cfg.memory_mib)
        self._cfg, self._max_tokens = cfg, max_tokens
        self._zero_on = {*zero_on, *cfg.zero_on}

    async def __call__(self, problem: Problem, responses: Sequence[Completed]) -> list[Score]:
        asked = range(min(1, len(responses)) if self.whole else len(responses))
        found = await asyncio.gather(*(self._asked(problem, responses, i) for i in asked))
        scores = [score for some in found for score in some]
        return [self._valued(score, of) for score, of in zip(scores, responses, strict=True)]

    def _valued(self, score: Score, response: Completed) -> Score:
        if score.failure is None:
            return _shaped(score, response, self._cfg, self._max_tokens)
        if score.failure in self._zero_on:
            return Score.zero(score.failure)
        return unscored(score.failure, self._cfg)

    async def _asked(
        self, problem: Problem, responses: Sequence[Completed], index: int
    ) -> list[Score]:
        """Returns what `score` does. After a failure that a retry may cure, it is retried as often as the
        settings say."""
        scores = await self.score(problem, responses, index)
        retries = self._cfg.retries if self._cfg.on_error == "retry" else 0
        for retry in range(retries):
            if all(s.failure is None or s.failure in self._zero_on for s in scores):
                break
            await asyncio.sleep(self._cfg.retry_pause_s * 2**retry)
            scores = await self.score(problem, responses, index)
        return scores


def unscored(cause: FailureCause, cfg: RewardConfig) -> Score:
    """Returns the score that `reward.on_error` gives to a failure that the response did not cause."""
    return Score.zero(cause, cause) if cfg.on_error == "zero" else Score.failed(cause)


class RewardBySource:
    """The rewards of several tasks, of which a problem names its own."""

    def __init__(self, rewards: Mapping[str, Reward]) -> None:
        self._rewards = rewards
        self._all = list({id(reward): reward for reward in rewards.values()}.values())

    @property
    def failure(self) -> str:
        return next(filter(None, (reward.failure for reward in self._all)), "")

    async def start(self) -> None:
        for reward in self._all:
            await reward.start()

    async def __call__(self, problem: Problem, responses: Sequence[Completed]) -> list[Score]:
        if problem.source not in self._rewards:
            raise RecordError(f"no task or evaluation set is called {problem.source!r}")
        return await self._rewards[problem.source](problem, responses)

    async def close(self) -> None:
        for reward in self._all:
            await reward.close()


def build_reward(run: Run) -> Reward:
    """Returns the reward of a run, not started yet: that of each of its tasks and evaluation sets. Those that
    judge alike are one."""
    rewards: dict[str, Reward] = {}
    alike: dict[object, Reward] = {}
    for name in run.sources:
        part = run.of(name)
        key = (_reward_file(part), part.task.grader, msgspec.json.encode(part.reward))
        if key not in alike:
            alike[key] = _reward_of(part)
        rewards[name] = alike[key]
    return RewardBySource(rewards) if len(rewards) > 1 else rewards[""]


def _reward_of(run: Run) -> Reward:
    cfg, max_tokens, grader = run.reward, run.rollout.sampling.max_tokens, run.task.grader
    if cfg.judge:
        # One process, as it remembers verdicts and counts calls; none of its failures is a reward, and it asks
        # again itself.
        source = ("judge", msgspec.json.encode(cfg.judge).decode(), "")
        own = {"processes": 1, "timeout_s": _JUDGE_S, "zero_on": (), "on_error": "drop"}
        return IsolatedReward(source, msgspec.structs.replace(cfg, **own), max_tokens)
    if file := _reward_file(run):
        call = tomli_w.dumps({"name": cfg.function, "settings": cfg.settings})
        return IsolatedReward(("file", file, call), cfg, max_tokens)
    if GRADERS[grader].slow:
        return IsolatedReward(("grader", grader, ""), cfg, max_tokens, GRADERS[grader].zero_on)
    return InlineReward(GRADERS[grader], cfg, max_tokens, stop_strings(run.rollout.sampling))


def second_opinion(run: Run) -> Opinion | None:
    """Returns what else can say whether a response is right, where a user's file gives the rewards: the task's
    own grader, or for a Python task and a slow grader True for the very answer and None for all else. None for
    rewards that are the task's own, an agent's or an environment's."""
    if isinstance(run.rollout.environment, External | PythonEnvironment):
        return None
    if isinstance(run.task, Mix):
        by_name = {name: second_opinion(run.of(name)) for name in run.task.sources}
        if not any(by_name.values()):
            return None
        return lambda problem, response: (
            opinion(problem, response) if (opinion := by_name.get(problem.source)) else None
        )
    if _reward_file(run) is None:
        return None
    grader = GRADERS.get(run.task.grader)
    if grader is None or grader.slow:
        return lambda problem, response: response.strip() == problem.answer.strip() or None
    stops = stop_strings(run.rollout.sampling) if grader.whole else ()
    return lambda problem, response: grader.score(problem, _without_stop(response, stops)).correct


def answer_of(cfg: TaskConfig, sampling: Sampling | None = None) -> Callable[[str], str | None]:
    """Returns the function that finds the answer in a response, for majority votes. With a user's reward file
    it is the text itself."""
    if cfg.grader not in GRADERS:
        return str.strip
    grader = GRADERS[cfg.grader]
    stops = stop_strings(sampling) if sampling and grader.whole else ()
    return lambda response: grader.answer(_without_stop(response, stops))


def _without_stop(text: str, stops: Sequence[str]) -> str:
    """Returns `text` without the stop string that it ends with, if it ends with one."""
    return next((text.removesuffix(stop) for stop in stops if text.endswith(stop)), text)


def columns_for(run: Run) -> Columns | dict[str, Columns]:
    """Returns the columns of a problem's row that its ticket carries: all, which is None, or those that
    `reward.columns` names where the reward, the order or the environment is a user's own, else none; of a
    mixture, those of each task by its name."""
    if isinstance(run.task, Mix):
        return {name: columns_of_one(run.of(name)) for name in run.task.sources}
    return columns_of_one(run)


def columns_of_one(run: Run) -> Columns:
    """Returns what `columns_for` does, for a run of one task."""
    own = _reward_file(run) is not None or run.reward.judge is not None
    own = own or isinstance(run.learner.order, PythonOrder)
    own = own or isinstance(run.rollout.environment, PythonEnvironment)
    return run.reward.columns if own else ()


def _reward_file(run: Run) -> str | None:
    return parted(run.task.path)[0] if isinstance(run.task, Python) else run.reward.path


def check_reward(run: Run) -> None:
    """Raises ConfigError or TaskError for a reward with which no worker could start."""
    for name in run.sources:
        part = run.of(name)
        file = _reward_file(part)
        if part.reward.judge:
            _check_judge(part.reward)
        elif file is None:
            check_extra(part.task.grader)
        elif isinstance(part.task, Python):  # the learner loads the problems from the same file
            load_reward(file, part.reward.function, part.reward.settings)
        else:
            digest_of(file)


def has_own_reward(run: Run) -> bool:
    """Returns True if some reward is in a file of the user's own that `check_reward` does not load."""
    if isinstance(run.rollout.environment, External | PythonEnvironment):
        return False  # the rewards are theirs
    return any(run.of(name).reward.path for name in run.sources)


async def try_start(run: Run) -> None:
    """Starts the rewards as a worker does, and ends them. Raises TaskError or ConfigError for one that cannot
    be loaded."""
    reward = build_reward(run)
    try:
        await reward.start()
    finally:
        await reward.close()


def _check_judge(cfg: RewardConfig) -> None:
    assert cfg.judge
    if cfg.path:
        raise ConfigError(
            "reward.judge, reward.path: a response has one reward, so give one of them"
        )
    if "{response}" not in cfg.judge.prompt:
        raise ConfigError(
            "reward.judge.prompt: {response} is not in it, so every response is the same"
        )
    try:
        groups = re.compile(cfg.judge.pattern).groups
    except re.error as error:
        raise ConfigError(f"reward.judge.pattern: {error}") from error
    if groups != 1:
        raise ConfigError(f"reward.judge.pattern: one group is the score, and it has {groups}")
    if importlib.util.find_spec("aiohttp") is None:
        raise ConfigError(f"reward.judge needs aiohttp: {installing('server')}")


def _shaped(score: Score, response: Completed, cfg: RewardConfig, max_tokens: int) -> Score:
    """Returns the weighted sum, with every part that has a weight. With default settings it is `score`
    itself."""
    parts = dict(score.parts)
    reward = cfg.correct * score.reward
    if cfg.format:
        parts["format"] = float(STYLES[cfg.style](response.text))
        reward += cfg.format * parts["format"]
    if cfg.length:
        parts["length"] = max(0.0, 1 - response.tokens / max_tokens) if score.correct else 0.0
        reward += cfg.length * parts["length"]
    if cfg.overlong:
        parts["overlong"] = overlong_penalty(response.tokens, cfg.overlong)
        reward += parts["overlong"]
    return Score(reward, score.correct, parts, notes=score.notes)


def overlong_penalty(tokens: int, cfg: Overlong) -> float:
    """Returns 0, then falls linearly over the last `cache_tokens`, and is -1 from `max_tokens` on (DAPO eq.
    13).

    Example: max_tokens 16, cache_tokens 4: lengths 12, 14, 16, 17 give 0, -0.5, -1, -1.
    """
    begin = cfg.max_tokens - cfg.cache_tokens
    return min(0.0, max(-1.0, (begin - tokens) / cfg.cache_tokens))
