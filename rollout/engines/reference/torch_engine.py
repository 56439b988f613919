"""The reference engine: continuous batching over a slotted KV cache, on a CPU or one GPU.

A step is one forward pass over [last tokens of the R rows | the prompts just admitted], one draw, and one
transfer to the host, of which rows are done. Rows 0 … R-1 own slots 0 … R-1; when some finish, the last rows
move into their places. A prompt is computed once, and its keys and values are copied to the slots of its group.
What all prompts begin with is computed once for each version of the weights.
The state of the rows is in tensors, so that the work in Python does not grow with the number of rows.
"""

import math
import time
from collections import deque

import msgspec
import numpy as np
import torch
from torch import Tensor

from areal_q.checks.machine import check_device
from areal_q.config import TorchEngine
from areal_q.errors import RecordError, WeightVersionError
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Completion, Request, check_fits, not_finite
from rollout.engines.reference import CAPABILITIES
from rollout.engines.reference.async_engine import AsyncEngine, Job, StepVersions
from rollout.engines.reference.batch_state import BatchState
from rollout.engines.reference.build_ops import build_ops
from rollout.engines.reference.inference_model import InferenceModel
from rollout.engines.reference.kv_cache import (
    KVCache,
    PrefillAttention,
    PromptPrefix,
    combined_attention,
)
from rollout.engines.reference.kv_cache_fp8 import build_cache
from rollout.engines.reference.sampling import Knobs, truncates

PREFILL_TOKENS = 8192
"""Most padded prompt tokens in one forward pass; a longer prompt is computed by itself."""


def torch_engine(config: TorchEngine) -> AsyncEngine:
    """Returns the reference engine. Raises ConfigError for a device that torch does not have."""
    check_device("rollout.engine.device", config.device)
    return AsyncEngine(TorchStepper(config))


class TorchStepper:
    name = "torch"
    capabilities = CAPABILITIES
    tokens_per_s = math.inf

    def __init__(self, config: TorchEngine) -> None:
        self.config, self.slots = config, config.slots
        self.ops = build_ops(config)
        self.waiting: deque[Job] = deque()
        self.steps = 0
        self.versions = StepVersions()
        self.model: InferenceModel | None = None
        self.owners: list[tuple[Job, int]] = []
        """The job of each row, and the index of the row's response in the job's group"""
        self.running: dict[Job, int] = {}
        """Number of rows that each job still has"""
        self.prefix = PromptPrefix()
        self.batch: BatchState
        self.cache: KVCache

    @property
    def version(self) -> int:
        return -1 if self.model is None else self.model.manifest.version

    @property
    def active(self) -> int:
        return len(self.owners)

    def check_request(self, request: Request) -> None:
        assert self.model is not None
        check_fits(request, self.model.config)

    def prepare(self, weights: WeightVersion) -> InferenceModel:
        model = InferenceModel(weights, self.config.device, self.ops)
        if self.model is not None and model.config != self.model.config:
            raise WeightVersionError(f"version {model.manifest.version} is of another model")
        return model

    @torch.inference_mode()
    def swap(self, prepared: InferenceModel) -> None:
        if self.model is None:
            self.cache = build_cache(prepared.config, self.config)
            self.batch = BatchState(prepared.config, self.config.device)
        self.model = prepared
        self.cache.new_version(prepared.kv_scales)
        self.prefix.layers = []
        self.versions.swapped(self.steps, prepared.manifest)
        if self.config.kv_on_update == "recompute":
            self._recompute(prepared)

    @torch.inference_mode()
    def step(self) -> int:
        model, old = self.model, self.active
        assert model is not None
        jobs = self._admit()
        new = self.active
        if not new:
            return 0
        logits = self._forward(model, old, jobs)
        tokens, logprobs = self._draw(logits)
        done = self.batch.append(new, tokens, logprobs)
        self.steps += 1
        self._report(tokens, logprobs)
        ended = np.flatnonzero(done.cpu().numpy()).tolist()  # nonzero() would wait for a GPU twice
        finished = sorted({*ended, *self._stopped(tokens)})
        if finished:
            self._finish(finished)
        return new

    def drop(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        slots = [slot for slot, (owner, _) in enumerate(self.owners) if owner is job]
        if slots:
            with torch.inference_mode():
                self._free(slots)

    def _admit(self) -> list[Job]:
        """Gives rows to waiting jobs, first come, first served, whole groups at a time and as many as fit into
        one forward pass. Returns those jobs."""
        jobs: list[Job] = []
        longest, rows = 0, self.active
        while self.waiting:
            request = self.waiting[0].request
            longest = max(longest, len(request.prompt_ids))
            full = rows + request.num_samples > self.config.slots
            if full or (jobs and longest * (len(jobs) + 1) > PREFILL_TOKENS):
                break
            jobs.append(self.waiting.popleft())
            rows += request.num_samples
        if not jobs:
            return []
        # Slots double, so that a steady trickle of requests does not copy the cache each time.
        room = min(self.config.slots, max(16, 1 << (rows - 1).bit_length()))
        ends = [len(j.request.prompt_ids) + j.request.sampling.max_tokens for j in jobs]
        self.batch.reserve(room, max(ends))
        self.cache.reserve(room, max(ends))
        self.batch.narrow(max((len(j.request.stop_ids) for j in self.running), default=0))
        return self._place(jobs)

    def _place(self, jobs: list[Job]) -> list[Job]:
        """Gives `jobs` the next rows and returns those that have them. A request with a number that does not
        fit into its tensor fails alone."""
        requests = [job.request for job in jobs]
        try:
            self.batch.fill(self.active + sum(r.num_samples for r in requests), requests)
        except (OverflowError, TypeError, ValueError) as error:
            if len(jobs) > 1:
                return [placed for job in jobs for placed in self._place([job])]
            jobs[0].fail(RecordError(f"a number of the request does not fit: {error}"))
            return []
        for job in jobs:
            job.start(self.steps)
            self.running[job] = job.request.num_samples
            self.owners += [(job, index) for index in range(job.request.num_samples)]
        return jobs

    def _forward(self, model: InferenceModel, old: int, jobs: list[Job]) -> Tensor:
        """Returns the logits [R, V] of every row's next token. The prompts of `jobs`, which own the rows from
        `old` on, are computed too."""
        positions = self.batch.length[:old] - 1
        tokens = self.batch.ids[:old].gather(1, positions.unsqueeze(1)).squeeze(1)
        decode = self.ops.decode(self.cache, positions, self._longest()) if old else None
        routes: list[Tensor] | None = [] if model.config.experts else None
        if not jobs:
            assert decode is not None
            hidden = model.forward(tokens, positions, decode, routes)
            self._record(routes, positions)
            return model.logits(hidden)
        copies = torch.tensor([job.request.num_samples for job in jobs])
        device = self.config.device
        source = torch.arange(len(jobs)).repeat_interleave(copies).to(device, non_blocking=True)
        start = self._shared(model, jobs)
        lengths = [len(job.request.prompt_ids) - start for job in jobs]
        width, firsts = max(lengths), copies.cumsum(0) - copies + old
        prompts = self.batch.ids[firsts.to(device, non_blocking=True), start : start + width]
        at = torch.arange(start, start + width, device=device).repeat(len(jobs))
        prefix = self.prefix if start else None
        prefill = PrefillAttention(self.cache, old, source, len(jobs), prefix)
        hidden = model.forward(
            torch.cat((tokens, prompts.flatten())),
            torch.cat((positions, at)),
            combined_attention(decode, prefill, old) if decode else prefill,
            routes,
        )
        self._record(routes, positions, source, width)
        last = [old + i * width + length - 1 for i, length in enumerate(lengths)]
        logits = model.logits(hidden[[*range(old), *last]])
        return torch.cat((logits[:old], logits[old:][source]))

    def _shared(self, model: InferenceModel, jobs: list[Job]) -> int:
        """Returns the number of tokens with which the prompts of `jobs` begin and whose keys and values are in
        `prefix`. It is 0 where routes are recorded or scales of an FP8 cache measured, over whole prompts."""
        if model.config.experts or self.config.kv_cache != "auto":
            return 0
        shared = self.prefix.shared([job.request.prompt_ids for job in jobs])
        if shared and not self.prefix.layers:
            ids = torch.from_numpy(self.prefix.ids.astype(np.int64)).to(self.config.device)
            at = torch.arange(shared, device=ids.device)
            model.forward(ids, at, lambda i, qkv: self.prefix.observe(i, qkv, self.cache))
        return shared

    def _record(
        self,
        routes: list[Tensor] | None,
        positions: Tensor,
        source: Tensor | None = None,
        width: int = 0,
    ) -> None:
        """Stores the experts of the rows' last tokens, at `positions`, and then those of the prompts, `width`
        tokens each. Prompt source[j] is that of the j-th new row."""
        if not routes:
            return
        old, taken = len(positions), torch.stack(routes, 1)
        self.batch.add_routes(positions, taken[:old])
        if source is not None:
            self.batch.put_routes(old, taken[old:].unflatten(0, (-1, width))[source])

    def _longest(self) -> int:
        """Returns the largest number of tokens in a row, without waiting for the device."""
        return max(len(j.request.prompt_ids) + self.steps - j.started for j in self.running)

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = self.batch, len(logits)
        u = self.ops.uniform(rows.keys[:n], rows.length[:n])
        truncated = any(truncates(job.request.sampling) for job in self.running)
        knobs = rows.temperature[:n], rows.top_k[:n], rows.top_p[:n], rows.min_p[:n]
        return self.ops.draw(logits, Knobs(*knobs, truncated), u)

    def _report(self, tokens: Tensor, logprobs: Tensor) -> None:
        if not any(job.on_token for job in self.running):
            return
        token_list, logprob_list = tokens.tolist(), logprobs.tolist()
        for row, (job, index) in enumerate(self.owners):
            if job.on_token:
                job.post(job.on_token, index, token_list[row], logprob_list[row])

    def _stopped(self, tokens: Tensor) -> list[int]:
        """Returns the rows that end for a reason that is not in the tensors: a stop of several tokens, a stop
        string, or the time limit."""
        watched = {job for job in self.running if job.stoppers or job.deadline_s < math.inf}
        if not watched:
            return []
        now_s, found = time.monotonic(), []
        token_list = tokens.tolist()
        for row, (job, index) in enumerate(self.owners):
            stopped = job.stoppers and job.stoppers[index](token_list[row])
            if stopped or now_s >= job.deadline_s:
                found.append(row)
        return found

    def _drawn(self, slots: list[int]) -> list[tuple[Job, int, Completion]]:
        """Returns (job, index in its group, response so far) of each of these slots."""
        found = []
        ids, logprobs, lengths = self.batch.read(slots)
        for slot, row_ids, row_logprobs, length in zip(slots, ids, logprobs, lengths, strict=True):
            job, index = self.owners[slot]
            start = len(job.request.prompt_ids)
            response = row_ids[start:length].astype(np.int32)
            completion = Completion(
                response_ids=response,
                logprobs=row_logprobs[start:length].copy(),
                spans=self.versions.spans(job.started, len(response)),
                finish_reason=job.finish_reason(index, response),
                routes=self.batch.read_routes(slot, length - 1),
            )
            found.append((job, index, completion))
        return found

    @torch.inference_mode()
    def unfinished(self, job: Job) -> dict[int, Completion]:
        slots = [slot for slot, (owner, _) in enumerate(self.owners) if owner is job]
        found = {index: done for _, index, done in self._drawn(slots)} if slots else {}
        return {
            index: msgspec.structs.replace(completion, finish_reason=None)
            for index, completion in found.items()
            if np.isfinite(completion.logprobs).all()
        }

    def _finish(self, slots: list[int]) -> None:
        for slot, (job, index, completion) in zip(slots, self._drawn(slots), strict=True):
            if np.isfinite(completion.logprobs).all():
                job.complete(index, completion)
            else:
                # A NaN left in the cache would reach the slot's next row, since a weight of 0 times NaN is NaN.
                self.cache.clear(torch.tensor([slot]))
                job.fail(not_finite(self.version))
        self._free(slots)

    def _free(self, slots: list[int]) -> None:
        """Frees the rows `slots`, in ascending order; the last rows move into their places."""
        length = self._longest()
        remaining = self.active - len(slots)
        for slot in slots:
            job = self.owners[slot][0]
            self.running[job] -= 1
            if not self.running[job]:
                del self.running[job]
        gone = set(slots)
        targets = [slot for slot in slots if slot < remaining]
        sources = [slot for slot in range(remaining, self.active) if slot not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.owners[target] = self.owners[source]
        del self.owners[remaining:]
        if targets:
            device = self.config.device
            to, frm = torch.tensor(targets, device=device), torch.tensor(sources, device=device)
            self.cache.move(frm, to, length)
            self.batch.move(frm, to)
        self.versions.forget_before(min((j.started for j in self.running), default=self.steps))

    def _recompute(self, model: InferenceModel) -> None:
        """Rebuilds the keys and values of all rows with the new weights."""
        if not self.active:
            return
        width = self._longest() - 1
        rows = max(1, PREFILL_TOKENS // width)
        for first in range(0, self.active, rows):
            count = min(rows, self.active - first)
            tokens = self.batch.ids[first : first + count, :width].flatten()
            positions = torch.arange(width, device=tokens.device).repeat(count)
            source = torch.arange(count, device=tokens.device)
            model.forward(tokens, positions, PrefillAttention(self.cache, first, source, count))
