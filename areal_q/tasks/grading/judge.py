"""A judge: a model behind OpenAI's chat API, which says how good a response is. Imports no torch.

    response ─▶ the prompt of the settings ─▶ POST URL/chat/completions ─▶ "… Score: 7" ─▶ 7 / 10, and the words
                      └ asked before, or being asked: the same verdict

It runs in the reward's process. Whatever the server does, a response gets a verdict or is left out as
`unavailable`: a judge that fails says nothing about the response.
"""

import asyncio
import json
import random
import re
from functools import partial
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from areal_q.config.tasks import Judge
from areal_q.errors import RewardUnavailable, TaskError
from areal_q.system.credentials import secret, shown
from areal_q.tasks.base import Problem
from areal_q.tasks.grading.own_reward import Responses, row_of

_PASSING = (408, 409, 425, 429)
"""HTTP statuses below 500 after which the same request may succeed"""
_MOST_BYTES = 1 << 20
"""Longest answer of a server"""
_MOST_KEPT = 1 << 16
"""Verdicts that are remembered"""
_LONGEST_PAUSE_S = 60.0
"""Longest time that a server's Retry-After is heeded for"""
_FIELD = re.compile(r"\{(\w+)\}")


class Verdict(Struct, frozen=True):
    """What the judge said: its score over the best one, from 0 to 1, and its words."""

    score: float
    words: str


class _NoVerdict(Exception):
    """One request brought no verdict; `again` is False if another one would bring none either."""

    def __init__(self, why: str, again: bool = True, pause_s: float = 0.0) -> None:
        super().__init__(why)
        self.again, self.pause_s = again, pause_s


class AskedJudge:
    """A judge as its process asks it."""

    def __init__(self, cfg: Judge) -> None:
        """Raises ConfigError if the file with the key cannot be read."""
        self._cfg, self._url = cfg, f"{cfg.url.rstrip('/')}/chat/completions"
        self._key = secret("AREAL_Q_JUDGE_TOKEN_FILE")
        self._verdicts: dict[bytes, asyncio.Task[Verdict]] = {}
        self._free = asyncio.Semaphore(cfg.connections)
        self._session: Any = None
        self.calls = self.tokens = 0

    async def score(self, problem: Problem, responses: Responses, index: int) -> dict[str, Any]:
        """Returns the reward and the judge's words. Raises RewardUnavailable without a verdict, and TaskError
        for a field of the prompt that the problem does not have."""
        verdict = await self.verdict(asked_of_judge(self._cfg, problem, responses[index].text))
        return {"reward": verdict.score, "judge": verdict.words}

    async def verdict(self, text: str) -> Verdict:
        """Returns the verdict about this text, for which the server is asked once."""
        key = blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        if key not in self._verdicts:
            if len(self._verdicts) >= _MOST_KEPT:
                self._verdicts.pop(next(iter(self._verdicts)))
            self._verdicts[key] = asyncio.create_task(self._asked(text))
            self._verdicts[key].add_done_callback(partial(self._forget_failed, key))
        # Others may wait for the same one when this response is given up.
        return await asyncio.shield(self._verdicts[key])

    def _forget_failed(self, key: bytes, asked: asyncio.Task[Verdict]) -> None:
        """Has the server asked again, also where nobody waited for the failure."""
        if (asked.cancelled() or asked.exception()) and self._verdicts.get(key) is asked:
            del self._verdicts[key]

    async def _asked(self, text: str) -> Verdict:
        cfg, why = self._cfg, ""
        async with self._free:
            for again in range(cfg.retries + 1):
                self._check_budget()
                try:
                    return await self._once(text)
                except _NoVerdict as error:
                    why = str(error)
                    if not error.again:
                        break
                    pause_s = max(cfg.retry_pause_s * 2**again, error.pause_s)
                if again < cfg.retries:
                    await asyncio.sleep(pause_s * random.uniform(1, 1.25))
        raise RewardUnavailable(f"reward.judge: {shown(self._url)}: {why}")

    def _check_budget(self) -> None:
        cfg = self._cfg
        if cfg.max_calls and self.calls >= cfg.max_calls:
            raise RewardUnavailable(f"reward.judge.max_calls: all {cfg.max_calls:,} are spent")
        if cfg.max_total_tokens and self.tokens >= cfg.max_total_tokens:
            raise RewardUnavailable(
                f"reward.judge.max_total_tokens: {self.tokens:,} of {cfg.max_total_tokens:,} are spent"
            )

    async def _once(self, text: str) -> Verdict:
        import aiohttp

        if self._session is None:
            keyed = {"Authorization": f"Bearer {self._key}"} if self._key else {}
            limit = aiohttp.ClientTimeout(total=self._cfg.timeout_s)
            pool = aiohttp.TCPConnector(limit=self._cfg.connections)
            self._session = aiohttp.ClientSession(headers=keyed, timeout=limit, connector=pool)
        asked = {
            "model": self._cfg.model,
            "messages": [{"role": "user", "content": text}],
            "temperature": self._cfg.temperature,
            "max_tokens": self._cfg.max_tokens,
        }
        self.calls += 1
        try:
            # Another place that the server names would be sent the key.
            async with self._session.post(self._url, json=asked, allow_redirects=False) as answer:
                data = b""
                async for part in answer.content.iter_any():
                    data += part
                    if len(data) > _MOST_BYTES:
                        raise _NoVerdict(f"an answer of more than {_MOST_BYTES} bytes")
                status, wait = answer.status, answer.headers.get("Retry-After", "")
        except TimeoutError as error:
            raise _NoVerdict(f"no answer in {self._cfg.timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise _NoVerdict(str(error) or type(error).__name__) from error
        if status != 200:
            said = f"{status} {data[:200].decode(errors='replace')}"
            pause_s = min(float(wait), _LONGEST_PAUSE_S) if wait.isdecimal() else 0.0
            raise _NoVerdict(said, status >= 500 or status in _PASSING, pause_s)
        return self._read(data)

    def _read(self, data: bytes) -> Verdict:
        try:
            answer = json.loads(data)
            used = (answer.get("usage") or {}).get("total_tokens") or 0
            self.tokens += used
            choice = answer["choices"][0]
            words = choice["message"]["content"]
            if (
                choice.get("finish_reason") == "length"
            ):  # it may yet take back a score that it named
                raise _NoVerdict(f"its reply was cut off at max_tokens = {self._cfg.max_tokens}")
            found = re.findall(self._cfg.pattern, words)
            score = float(found[-1])
        except IndexError as error:
            raise _NoVerdict("its answer has no score") from error
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise _NoVerdict(f"its answer is none of OpenAI's API: {data[:80]!r}") from error
        if not 0 <= score <= self._cfg.best:
            raise _NoVerdict(f"its score of {score:g} is not between 0 and {self._cfg.best:g}")
        return Verdict(score / self._cfg.best, words)


def asked_of_judge(cfg: Judge, problem: Problem, response: str) -> str:
    """Returns the prompt for the judge, with {prompt}, {response}, {answer} and the columns of the row filled
    in. Raises TaskError for any other name."""
    fields = row_of(problem) | {
        "prompt": problem.prompt,
        "answer": problem.answer,
        "response": response,
    }
    if unknown := [name for name in _FIELD.findall(cfg.prompt) if name not in fields]:
        raise TaskError(f"reward.judge.prompt: no {{{unknown[0]}}}; there are {', '.join(fields)}")
    # All at once, so that braces in a response are text.
    return _FIELD.sub(lambda field: str(fields[field[1]]), cfg.prompt)
