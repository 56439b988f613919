"""The engine of models that transformers computes: its forward pass and its cache, and our sampling.

A step is one forward pass and one draw for each group of responses. The responses to a prompt have the same
length at every step, so that a group needs neither padding nor a mask, whatever the model's layers keep in
their caches: the prompt is computed once, and its cache repeated for the group; when a response ends, its row
is taken out. Groups do not see each other, so that a response depends on no other group.
"""

import copy
import functools
import inspect
import math
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from areal_q.checks.machine import check_device
from areal_q.config import HfEngine
from areal_q.errors import RecordError, WeightVersionError
from areal_q.models.config import DecoderConfig
from areal_q.models.decoder import Decoder
from areal_q.models.foreign import COMPUTED_BY, TRANSFORMERS
from areal_q.models.low_bit.engine_policy import empty_engine_policy, load_published
from areal_q.models.low_bit.lora import LORA_SCALE
from areal_q.quant import FORMATS
from areal_q.quant.state_dict import check_shapes
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Capabilities, Completion, Request, check_fits, not_finite
from rollout.engines.reference.async_engine import AsyncEngine, Job, StepVersions
from rollout.engines.reference.sampling import Knobs, draw, random_uniform, seed_keys

CAPABILITIES = Capabilities(
    formats=frozenset(FORMATS), kv_on_update=frozenset({"keep", "recompute"})
)


def hf_engine(config: HfEngine) -> AsyncEngine:
    """Returns the engine. Raises ConfigError for a device that torch does not have."""
    check_device("rollout.engine.device", config.device)
    return AsyncEngine(GroupStepper(config))


@functools.cache
def takes_of(kind: type) -> frozenset[str]:
    """Returns the names of what a forward pass of transformers' class `kind` takes."""
    return frozenset(inspect.signature(kind.forward).parameters)  # type: ignore[attr-defined]


def cache_name(kind: type) -> str:
    """Returns what transformers' class `kind` calls its cache, in a call and in its outcome."""
    return "cache" if "cache" in takes_of(kind) else "past_key_values"  # until transformers 5.23


@dataclass(eq=False)
class Rows:
    """The responses of a job that have not ended, n of them."""

    job: Job
    indices: list[int]
    """Their indices in the group"""
    ids: Tensor
    """Prompt and responses so far, int64 [n, L]"""
    logprobs: Tensor
    """Log-probs of the tokens drawn in nats, float32 [n, L - prompt]"""
    keys: Tensor
    """Keys of their streams of random numbers, int64 [n]"""
    knobs: Knobs
    cache: Any = None
    """transformers' cache of all tokens but the last; None if it is to be computed"""

    @classmethod
    def of(cls, job: Job, device: str) -> "Rows":
        request, n = job.request, job.request.num_samples
        prompt = torch.as_tensor(np.asarray(request.prompt_ids, np.int64), device=device)
        return cls(
            job=job,
            indices=list(range(n)),
            ids=prompt.expand(n, -1),
            logprobs=torch.empty(n, 0, device=device),
            keys=seed_keys([request.seed + i for i in range(n)]).to(device),
            knobs=Knobs.of([request.sampling] * n, device),
        )

    @property
    def drawn(self) -> int:
        return self.logprobs.shape[1]

    def keep(self, places: list[int]) -> None:
        """Takes all rows out but those at `places`."""
        at = torch.tensor(places, dtype=torch.int64, device=self.ids.device)
        self.indices = [self.indices[place] for place in places]
        self.ids, self.logprobs, self.keys = self.ids[at], self.logprobs[at], self.keys[at]
        temperature, top_k, top_p, min_p = (knob[at] for knob in self.knobs[:4])
        self.knobs = Knobs(temperature, top_k, top_p, min_p, self.knobs.truncated)
        if self.cache is not None:
            self.cache.batch_select_indices(at)


class GroupStepper:
    name = "hf"
    capabilities = CAPABILITIES
    tokens_per_s = math.inf

    def __init__(self, config: HfEngine) -> None:
        self.config, self.slots = config, config.slots
        self.waiting: deque[Job] = deque()
        self.running: list[Rows] = []
        self.steps, self.version = 0, -1
        self.versions = StepVersions()
        self.model: Decoder | None = None
        self._empty: Decoder | None = None
        """The model without values, of which every version is a copy"""

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions if self.model else 0

    @property
    def active(self) -> int:
        return sum(len(rows.indices) for rows in self.running)

    def check_request(self, request: Request) -> None:
        assert self.model is not None
        check_fits(request, self.max_positions, self.model.config.vocab_size)

    def prepare(self, weights: WeightVersion) -> tuple[Decoder, WeightVersion]:
        manifest = weights.manifest
        where = f"version {manifest.version}"
        if manifest.format not in FORMATS:
            raise WeightVersionError(
                f"{where}: format {manifest.format!r} is none of {', '.join(FORMATS)}"
            )
        try:
            config = DecoderConfig.from_hf(manifest.model | {COMPUTED_BY: TRANSFORMERS})
            if self._empty is None:
                self._empty = empty_engine_policy(config, manifest.format)
            elif self._empty.config != config:
                raise WeightVersionError(f"{where} is of another model")
            shapes = {name: tuple(t.shape) for name, t in self._empty.state_dict().items()}
            check_shapes(weights.tensors, shapes, manifest.format)
            model = copy.deepcopy(self._empty)
            scale = float(manifest.extra.get(LORA_SCALE, 0.0))
            load_published(model, weights.tensors, self.config.device, scale)
        except WeightVersionError:
            raise
        except Exception as error:  # transformers raises anything
            raise WeightVersionError(f"{where}: {error}") from error
        return model, weights

    def swap(self, prepared: tuple[Decoder, WeightVersion]) -> None:
        self.model, weights = prepared
        self.version = weights.manifest.version
        self.versions.swapped(self.steps, weights.manifest)
        if self.config.kv_on_update == "recompute":
            for rows in self.running:
                rows.cache = None

    @torch.inference_mode()
    def step(self) -> int:
        self._admit()
        count = self.active
        for rows in self.running:
            logits = self._logits(rows)
            at = torch.full_like(rows.keys, rows.ids.shape[1])
            tokens, logprobs = draw(logits, rows.knobs, random_uniform(rows.keys, at))
            rows.ids = torch.cat((rows.ids, tokens[:, None]), 1)
            rows.logprobs = torch.cat((rows.logprobs, logprobs[:, None]), 1)
        self.steps += 1
        for rows in self.running:
            self._settle(rows)
        self.running = [rows for rows in self.running if rows.indices]
        oldest = min((rows.job.started for rows in self.running), default=self.steps)
        self.versions.forget_before(oldest)
        return count

    def unfinished(self, job: Job) -> dict[int, Completion]:
        return {
            index: self._completion(rows, place)
            for rows in self.running
            if rows.job is job and rows.drawn
            for place, index in enumerate(rows.indices)
        }

    def drop(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        self.running = [rows for rows in self.running if rows.job is not job]

    def _admit(self) -> None:
        while self.waiting:
            if self.active + self.waiting[0].request.num_samples > self.slots:
                return
            job = self.waiting.popleft()
            try:
                rows = Rows.of(job, self.config.device)
            except (OverflowError, TypeError, ValueError, RuntimeError) as error:
                job.fail(RecordError(f"a number of the request does not fit: {error}"))
                continue
            job.start(self.steps)
            self.running.append(rows)

    def _logits(self, rows: Rows) -> Tensor:
        """Returns the logits of each row's next token, float32 [n, V], and brings its cache up to date."""
        assert self.model is not None
        net: Any = self.model.net  # type: ignore[attr-defined]
        n, cache = len(rows.indices), cache_name(type(net))
        if rows.cache is not None:
            out = net(input_ids=rows.ids[:, -1:], use_cache=True, **{cache: rows.cache})
            rows.cache = out[cache]
            return out.logits[:, -1].float()
        last = {"logits_to_keep": 1} if "logits_to_keep" in takes_of(type(net)) else {}
        ids = rows.ids if rows.drawn else rows.ids[:1]
        out = net(input_ids=ids, use_cache=True, **last)
        rows.cache, logits = out[cache], out.logits[:, -1].float()
        if len(ids) < n:
            rows.cache.batch_repeat_interleave(n)
            logits = logits.repeat(n, 1)
        return logits

    def _settle(self, rows: Rows) -> None:
        """Tells of the tokens just drawn, and completes the responses that have ended with them."""
        job, now_s = rows.job, time.monotonic()
        tokens, logprobs = rows.ids[:, -1].tolist(), rows.logprobs[:, -1].tolist()
        spent = rows.drawn >= job.request.sampling.max_tokens or now_s >= job.deadline_s
        left = []
        for place, (index, token) in enumerate(zip(rows.indices, tokens, strict=True)):
            if job.on_token:
                job.post(job.on_token, index, token, logprobs[place])
            stopped = bool(job.stoppers) and job.stoppers[index](token)
            if not (stopped or spent or token in job.request.stop_ids):
                left.append(place)
                continue
            completion = self._completion(rows, place)
            if np.isfinite(completion.logprobs).all():
                job.complete(index, completion)
            else:
                job.fail(not_finite(self.version))
        if len(left) < len(rows.indices):
            rows.keep(left)

    def _completion(self, rows: Rows, place: int) -> Completion:
        ids = rows.ids[place, -rows.drawn :].cpu().numpy().astype(np.int32)
        job, index = rows.job, rows.indices[place]
        return Completion(
            response_ids=ids,
            logprobs=rows.logprobs[place].cpu().numpy().copy(),
            spans=self.versions.spans(job.started, len(ids)),
            finish_reason=job.finish_reason(index, ids.tolist()),
        )
