"""A teacher behind OpenAI's completions API: the log-probs of a prompt, as vLLM and SGLang give them.

    POST /completions {"prompt": [ids of prompt and response], "echo": true, "logprobs": 1, "max_tokens": 1, …}
    → choices[0].logprobs.token_logprobs: one for each id, null for the first, and that of a token drawn after

Token ids are sent, so that nothing is tokenized anew. A request without an answer is made again after 1 s, 2 s,
4 s …; one that the server refuses is not. A stop is heard between two requests.
"""

import http.client
import json
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request

import numpy as np

from areal_q.config import ServerTeacher
from areal_q.errors import ConfigError, Stopped, TeacherUnavailable
from areal_q.messages import Group, parts
from areal_q.system.credentials import secret, shown
from areal_q.system.local_requests import open_url
from learner.teacher.scoring import with_logprobs

PASSING = (408, 425, 429, 500, 502, 503, 504)
"""HTTP statuses after which the same request may succeed"""
LEAST = -9999.0
"""What servers give for a log-prob of -∞"""


class Server:
    """Scores by a server, with several requests at a time."""

    def __init__(
        self, cfg: ServerTeacher, alive: Callable[[], None], stop: threading.Event
    ) -> None:
        """Asks the server for the log-probs of two ids. `alive` is called after every answer. Raises
        ConfigError for a server that is no such one, TeacherUnavailable if it does not answer, and Stopped, as
        `scored` does, once `stop` is set."""
        self._cfg, self._alive, self._stop = cfg, alive, stop
        self._key = secret("AREAL_Q_TEACHER_TOKEN_FILE")
        self._threads = ThreadPoolExecutor(cfg.connections, "teacher")
        self._name = cfg.model or self._first_model()
        self._logprobs([1, 2])

    def scored(self, groups: Sequence[Group]) -> list[Group]:
        pairs = [
            pair
            for group in groups
            for t in group.trajectories
            for pair in parts(group.ticket.prompt_ids.numpy(), t)
        ]

        def score(pair: Any) -> np.ndarray:
            before, own = (pair[0].tolist(), pair[1].response_ids.numpy().tolist())
            return self._logprobs([*before, *own])[len(before) :]

        return with_logprobs(groups, self._each(score, pairs))

    def _each(self, score: Callable[[Any], np.ndarray], pairs: list[Any]) -> Iterable[np.ndarray]:
        for found in self._threads.map(score, pairs):
            self._alive()
            yield found

    def _first_model(self) -> str:
        listed = self._ask("models", None)
        try:
            return str(listed["data"][0]["id"])
        except (KeyError, IndexError, TypeError) as error:
            raise ConfigError(
                f"{self._where('models')}: lists no model; set learner.teacher.model"
            ) from error

    def _logprobs(self, ids: list[int]) -> np.ndarray:
        """Returns the log-probs of `ids`, float32 [T] nats; the first one's, which nothing predicts, is 0."""
        asked = {
            "model": self._name,
            "prompt": ids,
            "max_tokens": 1,
            "temperature": 0.0,
            "echo": True,
            "logprobs": 1,
        }
        answer, where = self._ask("completions", asked), self._where("completions")
        try:
            given = answer["choices"][0]["logprobs"]["token_logprobs"]
            # That of the token that it drew may follow; another would be of a token that it put before ours.
            if len(given) - len(ids) not in (0, 1):
                raise ConfigError(
                    f"{where}: gave {len(given)} log-probs where {len(ids)} ids and one more were asked for"
                )
            found = np.array([0.0, *(float(x) for x in given[1 : len(ids)])], np.float32)
        except ConfigError:
            raise
        except (KeyError, IndexError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(f"{where}: gives no log-probs of a prompt (`echo`)") from error
        if not np.isfinite(found).all():
            raise ConfigError(f"{where}: gave a log-prob that is not finite")
        return found.clip(LEAST, 0.0)

    def _ask(self, what: str, body: Any) -> Any:
        pause_s, why = 1.0, ""
        for again in range(self._cfg.retries + 1):
            if again:
                self._stop.wait(pause_s)
                pause_s *= 2
            if self._stop.is_set():
                raise Stopped(f"while {self._where(what)} was asked")
            try:
                return self._once(what, body)
            except HTTPError as error:
                why = f"{error.code} {error.read(500).decode(errors='replace')}"
                if error.code not in PASSING:
                    raise ConfigError(f"{self._where(what)}: refuses: {why}") from error
            except (OSError, http.client.HTTPException, ValueError) as error:
                why = str(error) or type(error).__name__
        raise TeacherUnavailable(
            f"{self._where(what)}: no answer to {self._cfg.retries + 1} requests: {why}"
        )

    def _once(self, what: str, body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        data = None if body is None else json.dumps(body).encode()
        request = Request(f"{self._cfg.url.rstrip('/')}/{what}", data, headers)
        with open_url(request, self._cfg.timeout_s) as reply:
            return json.loads(reply.read())

    def _where(self, what: str) -> str:
        return f"learner.teacher.url: {shown(self._cfg.url.rstrip('/'))}/{what}"
