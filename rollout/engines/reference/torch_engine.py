"""The reference engine: continuous batching over a KV cache in pages, on a CPU or one GPU.

A step is one forward pass over [last tokens of the R rows | pieces of prompts], one draw, and one transfer to
the host, of which rows are done. Rows 0 … R-1 own the first slots of the tensors; when some finish, the last
rows move into their places. A prompt is computed once for its group, piece by piece, so that a long one holds
nobody up for long; the whole pages of the cache that it has in common with what was computed before under the
same weights are not computed again (page_pool.py).
The state of the rows is in tensors, so that the work in Python does not grow with the number of rows.
"""

import math
import time
from collections import deque
from itertools import islice, starmap, takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from areal_q.checks.machine import check_device
from areal_q.config import TorchEngine
from areal_q.config.engines import PAGE, pages_of_group
from areal_q.errors import RecordError, WeightVersionError
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Completion, Request, check_fits, not_finite
from rollout.engines.reference import CAPABILITIES, build_ops
from rollout.engines.reference.async_engine import AsyncEngine, Job, StepVersions
from rollout.engines.reference.batch_state import BatchState
from rollout.engines.reference.delta_layer import DeltaPass
from rollout.engines.reference.inference_model import InferenceModel
from rollout.engines.reference.kv_cache import (
    KVCache,
    PrefillAttention,
    PromptPiece,
    States,
    combined_attention,
    places,
)
from rollout.engines.reference.kv_cache_fp8 import build_cache
from rollout.engines.reference.page_pool import page_keys
from rollout.engines.reference.prompts import Pass, Prompt, PromptQueue, know
from rollout.engines.reference.sampling import Knobs, draw_masked


def torch_engine(config: TorchEngine) -> AsyncEngine:
    """Returns the reference engine. Raises ConfigError for a device that torch does not have."""
    check_device("rollout.engine.device", config.device)
    return AsyncEngine(TorchStepper(config))


class Row(NamedTuple):
    """A response that is being drawn."""

    job: Job
    number: int
    """Its index in the job's group"""
    pages: list[int]
    """Pages of the cache that it owns, also in `BatchState.pages`"""
    prompt: Prompt
    sampling_mask: list[np.ndarray]
    """The ids that each of its tokens was drawn from, if its request wants to know"""


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
        self.prompts = PromptQueue(max(PAGE, config.prefill_tokens // PAGE * PAGE))
        self.rows: list[Row] = []
        self.running: dict[Job, int] = {}
        """Number of rows that each job still has"""
        self.batch: BatchState
        self.cache: KVCache

    @property
    def version(self) -> int:
        return -1 if self.model is None else self.model.manifest.version

    @property
    def max_positions(self) -> int:
        return self.model.config.max_positions if self.model else 0

    @property
    def active(self) -> int:
        return len(self.rows) + sum(p.job.request.num_samples for p in self.prompts.open)

    def check_request(self, request: Request) -> None:
        assert self.model is not None
        check_fits(request, self.max_positions, self.model.config.vocab_size)
        needed, most = _pages_needed(request, request.num_samples), self.cache.pool.most
        if needed > most:
            raise RecordError(
                f"a request of {needed} pages of {PAGE} tokens exceeds the {most} of kv_cache_bytes"
            )

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
        self.versions.swapped(self.steps, prepared.manifest)
        if self.config.kv_on_update == "recompute":
            self._recompute(prepared)

    @torch.inference_mode()
    def step(self) -> int:
        model = self.model
        assert model is not None
        self._admit()
        self._extend()
        pieces, ready = self.prompts.next_pieces(self.cache)
        if not self.rows and not pieces:
            return 0
        logits = self._forward(model, pieces, ready)
        if not self.rows:
            return 0
        tokens, logprobs = self._draw(logits)
        done = self.batch.append(len(self.rows), tokens, logprobs)
        self.steps += 1
        self._report(tokens, logprobs)
        ended = np.flatnonzero(done.cpu().numpy()).tolist()  # nonzero() would wait for a GPU twice
        finished = sorted({*ended, *self._stopped(tokens)})
        if finished:
            self._finish(finished)
        return len(logits)

    def drop(self, job: Job) -> None:
        if job in self.waiting:
            self.waiting.remove(job)
        for prompt in [p for p in self.prompts.open if p.job is job]:
            self.prompts.open.remove(prompt)
            self.cache.spoil(prompt.pages)
            self.cache.pool.release(prompt.pages)
        slots = [slot for slot, row in enumerate(self.rows) if row.job is job]
        for slot in slots:
            self.cache.spoil(self.rows[slot].pages)  # what was drawn was not looked at
        if slots:
            with torch.inference_mode():
                self._free(slots)

    def _admit(self) -> None:
        """Begins the prompts of waiting jobs, first come, first served, for whose responses there are slots and
        pages, however long they become."""
        if not self.waiting:
            return
        slots = self.config.slots - self.active
        if slots < self.waiting[0].request.num_samples:
            return
        begun = [(p.job.request, p.job.request.num_samples) for p in self.prompts.open]
        begun += [(job.request, left) for job, left in self.running.items()]
        pages = self.cache.pool.most - sum(starmap(_pages_needed, begun))
        while self.waiting:
            request = self.waiting[0].request
            slots -= request.num_samples
            pages -= _pages_needed(request, request.num_samples)
            if slots < 0 or pages < 0:
                return
            prompt = Prompt(self.waiting.popleft(), page_keys(request.prompt_ids[:-1]))
            if self.cache.config.delta:
                prompt.states = States.empty(self.cache.config, self.config.device)
            self.prompts.open.append(prompt)

    def _extend(self) -> None:
        """Gives another page to the rows whose pages are full."""
        full = {j for j in self.running if (self._length(j) - 1) % PAGE == 0}
        if not full:
            return
        slots = [slot for slot, row in enumerate(self.rows) if row.job in full]
        pages = self.cache.take(len(slots))
        self.batch.put_pages(slots, [len(self.rows[slot].pages) for slot in slots], pages)
        for slot, page in zip(slots, pages, strict=True):
            self.rows[slot].pages.append(page)

    def _forward(
        self, model: InferenceModel, pieces: list[PromptPiece], ready: list[Prompt]
    ) -> Tensor:
        """Computes the rows' last tokens and `pieces`, and gives rows to the prompts `ready`, whose pieces are
        the last ones. Returns the logits [R, V] of every row's next token."""
        old = len(self.rows)
        tables, positions = self.batch.pages[:old], self.batch.length[:old] - 1
        tokens = self.batch.ids[:old].gather(1, positions.unsqueeze(1)).squeeze(1)
        routes: list[Tensor] | None = [] if model.config.experts else None
        longest = max(map(self._length, self.running), default=0)
        attend = self.ops.decode(self.cache, tables, positions, longest) if old else None
        at = [places(tables, positions)] if routes is not None else []
        prefill = None
        if pieces:
            prefill = PrefillAttention(self.cache, pieces)
            tokens = torch.cat((tokens, prefill.tokens))
            positions = torch.cat((positions, prefill.positions))
            at.append(prefill.at)
            attend = combined_attention(attend, prefill, old) if attend else prefill
        assert attend is not None
        texts = DeltaPass(self.batch.states.at(slice(old)), prefill)
        hidden = model.forward(tokens, positions, attend, routes, texts)
        if routes:
            self.cache.put_routes(torch.cat(at), torch.stack(routes, 1))
        if not ready:
            return model.logits(hidden[:old])
        ends = old - 1 + np.cumsum([len(piece.ids) for piece in pieces], dtype=np.int64)
        placed = self._place(dict(zip(ready, ends[len(pieces) - len(ready) :], strict=True)))
        copies = [1] * old + [prompt.job.request.num_samples for prompt in placed]
        last = torch.tensor([*range(old), *placed.values()], dtype=torch.int64)
        spread = torch.arange(len(copies)).repeat_interleave(
            torch.tensor(copies, dtype=torch.int64)
        )
        device = self.config.device
        logits = model.logits(hidden[last.to(device, non_blocking=True)])
        return logits[spread.to(device, non_blocking=True)]

    def _place(self, ready: dict[Prompt, int]) -> dict[Prompt, int]:
        """Gives the next rows to the responses to prompts, and returns those that have them. A request with a
        number that does not fit into its tensor fails alone."""
        if not ready:
            return {}
        requests = [prompt.job.request for prompt in ready]
        rows = len(self.rows) + sum(r.num_samples for r in requests)
        # Slots double, so that a steady trickle of requests does not copy the state each time.
        room = min(self.config.slots, max(16, 1 << (rows - 1).bit_length()))
        ends = [len(r.prompt_ids) + r.sampling.max_tokens for r in requests]
        self.batch.reserve(room, max(ends))
        self.batch.narrow(max((len(j.request.stop_ids) for j in self.running), default=0))
        try:
            self.batch.fill(rows, requests)
        except (OverflowError, TypeError, ValueError) as error:
            if len(ready) > 1:
                return {
                    p: at for one in ready.items() for p, at in self._place(dict([one])).items()
                }
            (prompt,) = ready
            self.cache.spoil(prompt.pages)
            self.cache.pool.release(prompt.pages)
            prompt.job.fail(RecordError(f"a number of the request does not fit: {error}"))
            return {}
        self._begin(list(ready))
        return ready

    def _begin(self, prompts: list[Prompt]) -> None:
        """Makes the rows of the responses to `prompts`. They share the whole pages of their prompt; of the one
        that they go on in, each has its own."""
        first, sources = len(self.rows), list[int]()
        for prompt in prompts:
            length, others = len(prompt.job.request.prompt_ids), prompt.job.request.num_samples - 1
            sources += prompt.pages[length // PAGE :] * others
        targets = self.cache.take(len(sources))
        own = iter(targets)
        for prompt in prompts:
            job, length = prompt.job, len(prompt.job.request.prompt_ids)
            job.start(self.steps)
            self.running[job] = job.request.num_samples
            self.rows.append(Row(job, 0, prompt.pages, prompt, []))
            whole, begun = prompt.pages[: length // PAGE], len(prompt.pages) - length // PAGE
            for index in range(1, job.request.num_samples):
                pages = self.cache.pool.share(whole) + list(islice(own, begun))
                self.rows.append(Row(job, index, pages, prompt, []))
        if targets:
            self.cache.copy(sources, targets)
        self.batch.fill_pages(first, [row.pages for row in self.rows[first:]])
        for slot, row in enumerate(self.rows[first:], first):
            for own, kept in zip(self.batch.states.at(slot), row.prompt.states or (), strict=False):
                own.copy_(kept)
        for prompt in prompts:
            prompt.states = None

    def _length(self, job: Job) -> int:
        """Returns the number of tokens in a row of a running job, without waiting for the device."""
        return len(job.request.prompt_ids) + self.steps - job.started

    def _draw(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        rows, n = self.batch, len(logits)
        u = self.ops.uniform(rows.keys[:n], rows.length[:n])
        truncated = any(job.request.sampling.truncated for job in self.running)
        settings = rows.temperature[:n], rows.top_k[:n], rows.top_p[:n], rows.min_p[:n]
        knobs = Knobs(*settings, truncated)
        told = [i for i, row in enumerate(self.rows) if row.job.request.masked] if truncated else []
        if not told:
            return self.ops.draw(logits, knobs, u)
        at = torch.tensor(told, device=self.config.device)
        found = draw_masked(logits[at], knobs.at(at), u[at])
        for slot, ids in zip(told, found[2], strict=True):
            self.rows[slot].sampling_mask.append(ids)
        if len(told) == n:
            return found[:2]
        tokens, logprobs = self.ops.draw(logits, knobs, u)
        tokens[at], logprobs[at] = found[:2]
        return tokens, logprobs

    def _report(self, tokens: Tensor, logprobs: Tensor) -> None:
        if not any(job.on_token for job in self.running):
            return
        token_list, logprob_list = tokens.tolist(), logprobs.tolist()
        for (job, index, *_), token, logprob in zip(
            self.rows, token_list, logprob_list, strict=True
        ):
            if job.on_token:
                job.post(job.on_token, index, token, logprob)

    def _stopped(self, tokens: Tensor) -> list[int]:
        """Returns the rows that end for a reason that is not in the tensors: a stop of several tokens, a stop
        string, or the time limit."""
        watched = {job for job in self.running if job.stoppers or job.deadline_s < math.inf}
        if not watched:
            return []
        now_s, found = time.monotonic(), []
        token_list = tokens.tolist()
        for row, (job, index, *_) in enumerate(self.rows):
            stopped = job.stoppers and job.stoppers[index](token_list[row])
            if stopped or now_s >= job.deadline_s:
                found.append(row)
        return found

    def _drawn(self, slots: list[int]) -> list[tuple[Job, int, Completion]]:
        """Returns (job, index in its group, response so far) of each of these slots."""
        found = []
        ids, logprobs, lengths = self.batch.read(slots)
        for slot, row_ids, row_logprobs, length in zip(slots, ids, logprobs, lengths, strict=True):
            job, index, pages, _, mask = self.rows[slot]
            start = len(job.request.prompt_ids)
            response = row_ids[start:length].astype(np.int32)
            completion = Completion(
                response_ids=response,
                logprobs=row_logprobs[start:length].copy(),
                spans=self.versions.spans(job.started, len(response)),
                finish_reason=job.finish_reason(index, response),
                routes=self.cache.read_routes(pages, length - 1),
                sampling_mask=mask if job.request.masked else None,
            )
            found.append((job, index, completion))
        return found

    @torch.inference_mode()
    def unfinished(self, job: Job) -> dict[int, Completion]:
        slots = [slot for slot, row in enumerate(self.rows) if row.job is job]
        return {index: done for _, index, done in self._drawn(slots)} if slots else {}

    def _finish(self, slots: list[int]) -> None:
        failed = False
        for slot, (job, index, completion) in zip(slots, self._drawn(slots), strict=True):
            row = self.rows[slot]
            if np.isfinite(completion.logprobs).all():
                job.complete(index, completion)
                if (self._length(job) - 1) // PAGE > len(row.prompt.keys):
                    ids = np.concatenate((job.request.prompt_ids, completion.response_ids[:-1]))
                    know(self.cache, row.prompt, page_keys(ids, row.prompt.keys), row.pages)
            else:
                failed = True
                job.fail(not_finite(self.version))
        if failed:
            self.cache.spoil_all()
        self._free(slots)

    def _free(self, slots: list[int]) -> None:
        """Frees the rows `slots`, in ascending order; the last rows move into their places."""
        remaining = len(self.rows) - len(slots)
        for slot in slots:
            job, _, pages, *_ = self.rows[slot]
            self.cache.pool.release(pages)
            self.running[job] -= 1
            if not self.running[job]:
                del self.running[job]
        gone = set(slots)
        targets = [slot for slot in slots if slot < remaining]
        sources = [slot for slot in range(remaining, len(self.rows)) if slot not in gone]
        for source, target in zip(sources, targets, strict=True):
            self.rows[target] = self.rows[source]
        del self.rows[remaining:]
        if targets:
            device = self.config.device
            to, frm = torch.tensor(targets, device=device), torch.tensor(sources, device=device)
            self.batch.move(frm, to)
        self.versions.forget_before(min((j.started for j in self.running), default=self.steps))

    def _recompute(self, model: InferenceModel) -> None:
        """Computes the keys and values of all rows and begun prompts again with the new weights."""
        todo = [(p.job.request.prompt_ids[: p.done], p.pages, p.states) for p in self.prompts.open]
        if self.rows:
            ids, _, lengths = self.batch.read(list(range(len(self.rows))))
            for slot, (length, row) in enumerate(zip(lengths, self.rows, strict=True)):
                states = self.batch.states.at(slot) if model.config.delta else None
                todo.append((ids[slot][: length - 1], row.pages, states))
        computed, together = set[int](), Pass(self.prompts.most_tokens)
        for ids, pages, states in todo:
            shared = len(list(takewhile(computed.__contains__, pages))) if states is None else 0
            computed.update(pages)
            for start in range(shared * PAGE, len(ids), together.most_tokens):
                piece = PromptPiece(ids[start : start + together.most_tokens], start, pages, states)
                if not together.takes(piece):
                    self._compute(model, together.pieces)
                    together = Pass(together.most_tokens)
                    together.takes(piece)
        if together.pieces:
            self._compute(model, together.pieces)

    def _compute(self, model: InferenceModel, pieces: list[PromptPiece]) -> None:
        prefill = PrefillAttention(self.cache, pieces)
        texts = DeltaPass(self.batch.states.at(slice(0)), prefill)
        model.forward(prefill.tokens, prefill.positions, prefill, None, texts)


def _pages_needed(request: Request, responses: int) -> int:
    return pages_of_group(len(request.prompt_ids), responses, request.sampling.max_tokens)
