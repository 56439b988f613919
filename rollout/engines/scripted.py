"""An engine without a model: it answers from a formula, at a set pace, with the true log-probs of its draws.

It is for tests of everything around engines, and benchmarks measure the cost of everything else with it. At
each position the formula's token has probability `certainty(version)`, and the other tokens of the vocabulary
share the rest equally. Draws are seeded as in the torch engine, so that a seed and a version always give the
same response.
"""

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from areal_q.config import ScriptedEngine
from areal_q.errors import WeightVersionError
from areal_q.messages import Manifest
from areal_q.quant import FORMATS
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Completion, Request, check_fits
from rollout.engines.reference.async_engine import AsyncEngine, Job, StepVersions
from rollout.engines.reference.sampling import random_uniform, seed_keys

Answer = Callable[[Sequence[int]], Sequence[int]]
"""Function from the ids of a prompt to the ids of the scripted response, its stop id included"""


def reverse(prompt: Sequence[int]) -> Sequence[int]:
    return prompt[::-1]


def rising(version: int) -> float:
    """Returns the probability of the scripted token: 1/2 at version 0, 2/3 at version 1, and so on towards
    1."""
    return 1 - 1 / (version + 2)


def scripted_engine(
    config: ScriptedEngine,
    answer: Answer = reverse,
    certainty: Callable[[int], float] = rising,
    vocab_size: int = 64,
) -> AsyncEngine:
    """Returns the scripted engine. `vocab_size` applies until weights come whose manifest has a
    `vocab_size`."""
    return AsyncEngine(ScriptedStepper(config, answer, certainty, vocab_size))


@dataclass(eq=False)
class ScriptedResponse:
    job: Job
    index: int
    script: Sequence[int]
    u: np.ndarray
    """Random numbers, float64 [max_tokens]. Each decides whether a token is the scripted one, and if not, which
    other token it is."""
    ids: list[int]
    logprobs: list[float]


class ScriptedStepper:
    name = "scripted"
    capabilities = Capabilities(formats=frozenset(FORMATS), kv_on_update=frozenset({"keep"}))
    slots = 4096

    def __init__(
        self,
        config: ScriptedEngine,
        answer: Answer,
        certainty: Callable[[int], float],
        vocab_size: int,
    ) -> None:
        self.tokens_per_s = config.tokens_per_s
        self.answer, self.certainty, self.vocab_size = answer, certainty, vocab_size
        self.max_positions = 0
        self.version = -1
        self.waiting: deque[Job] = deque()
        self.responses: list[ScriptedResponse] = []
        self.steps = 0
        self.versions = StepVersions()

    @property
    def active(self) -> int:
        return len(self.responses)

    def check_request(self, request: Request) -> None:
        if self.max_positions:
            check_fits(request, self.max_positions, self.vocab_size)

    def prepare(self, weights: WeightVersion) -> Manifest:
        if weights.manifest.format not in FORMATS:
            raise WeightVersionError(f"format {weights.manifest.format!r} is unknown")
        return weights.manifest

    def swap(self, prepared: Manifest) -> None:
        self.version = prepared.version
        self.vocab_size = prepared.model.get("vocab_size", self.vocab_size)
        self.max_positions = prepared.model.get("max_position_embeddings", self.max_positions)
        self.versions.swapped(self.steps, prepared)

    def step(self) -> int:
        self._admit()
        certainty = self.certainty(self.version)
        running, self.responses = self.responses, []
        for r in running:
            token, logprob = self._draw(r, certainty)
            r.ids.append(token)
            r.logprobs.append(logprob)
        self.steps += 1
        for r in running:
            if r.job.on_token:
                r.job.post(r.job.on_token, r.index, r.ids[-1], r.logprobs[-1])
            if not self._ended(r):
                self.responses.append(r)
        self.versions.forget_before(
            min((r.job.started for r in self.responses), default=self.steps)
        )
        return len(running)

    def unfinished(self, job: Job) -> dict[int, Completion]:
        return {r.index: self._completion(r) for r in self.responses if r.job is job}

    def drop(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        self.responses = [r for r in self.responses if r.job is not job]

    def _admit(self) -> None:
        while self.waiting:
            request = self.waiting[0].request
            if self.active + request.num_samples > self.slots:
                break
            job = self.waiting.popleft()
            job.start(self.steps)
            ids, drawn = request.prompt_ids.tolist(), request.drawn
            script = [int(i) for i in self.answer(ids[: len(ids) - drawn])][drawn:]
            keys = seed_keys([request.seed + i for i in range(request.num_samples)])
            for index, key in enumerate(keys):
                u = random_uniform(key, drawn + torch.arange(request.sampling.max_tokens)).numpy()
                self.responses.append(ScriptedResponse(job, index, script, u, [], []))

    def _draw(self, r: ScriptedResponse, certainty: float) -> tuple[int, float]:
        """Returns a token and its log-prob: the scripted token if u < certainty, otherwise another one, chosen
        by the remainder of u."""
        at = len(r.ids)
        scripted = r.script[at] if at < len(r.script) else min(r.job.request.stop_ids, default=0)
        if r.job.request.sampling.temperature == 0:
            return scripted, 0.0
        u, others = float(r.u[at]), self.vocab_size - 1
        if u < certainty:
            return scripted, math.log(certainty)
        rest = min(int((u - certainty) / (1 - certainty) * others), others - 1)
        return rest + (rest >= scripted), math.log((1 - certainty) / others)

    def _ended(self, r: ScriptedResponse) -> bool:
        if r.job.stoppers:
            r.job.stoppers[r.index](r.ids[-1])
        if r.job.finish_reason(r.index, r.ids) is None:
            return False
        r.job.complete(r.index, self._completion(r))
        return True

    def _completion(self, r: ScriptedResponse) -> Completion:
        return Completion(
            response_ids=np.array(r.ids, np.int32),
            logprobs=np.array(r.logprobs, np.float32),
            spans=self.versions.spans(r.job.started, len(r.ids)),
            finish_reason=r.job.finish_reason(r.index, r.ids),
        )
