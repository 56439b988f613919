"""A response that is still being streamed, with the tokens that have arrived."""

from dataclasses import dataclass, field

import numpy as np
from msgspec.structs import replace

from areal_q.messages import FinishReason, VersionSpan, merge_spans
from rollout.engines.base import Completion, Request, finish_reason, not_finite
from rollout.engines.process.generation_backend import CompletionDelta
from rollout.engines.stop_conditions import stopper


@dataclass
class PartialCompletion:
    """One response and the tokens that have arrived, possibly from several streams one after the other."""

    request: Request
    seed: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    kept: list[VersionSpan] = field(default_factory=list)
    """Version spans of the tokens that came from streams which died"""
    deadline_s: float | None = None
    """Time of the event loop, in seconds, at which the response is cut off; None before its first token, and if
    there is no limit"""
    late: bool = False
    """True if that time has come"""
    routes: np.ndarray | None = None
    """Experts of the tokens of prompt and response; None until its last stream has ended, and if none were
    recorded"""
    sampling_mask: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        request = self.request
        before = request.prompt_ids[len(request.prompt_ids) - request.drawn :].tolist()
        self._stopper = stopper(request.sampling, request.decode, before)

    def add(self, piece: CompletionDelta, version: int, digest: str) -> CompletionDelta:
        """Appends `piece` up to the token that ends the response, as drawn with `version` unless the piece says
        otherwise. Returns what was appended."""
        ends = (
            i + 1 for i, token in enumerate(piece.ids) if self._stopper and self._stopper(token)
        )
        taken = next(ends, len(piece.ids))
        self.ids += piece.ids[:taken]
        self.logprobs += piece.logprobs[:taken]
        self.sampling_mask += piece.sampling_mask[:taken]
        if piece.routes is not None:
            known = len(self.request.prompt_ids) + len(self.ids) - 1
            self.routes = piece.routes[:known]
        if piece.spans is not None and taken == len(piece.ids):
            self.spans = merge_spans([*self.kept, *piece.spans])
        elif taken:
            self.spans = merge_spans([*self.spans, VersionSpan(version, taken, digest)])
        return CompletionDelta(ids=piece.ids[:taken], logprobs=piece.logprobs[:taken])

    @property
    def stopped(self) -> bool:
        """True if the response has completed a stop that the backend does not check itself."""
        return self._stopper is not None and self._stopper.stopped

    @property
    def finish_reason(self) -> FinishReason | None:
        return finish_reason(self.request, self.ids, stopped=self.stopped, late=self.late)

    def rest(self) -> Request:
        """Returns a request for the rest of the response: its prompt includes the tokens that have arrived."""
        if not self.ids:
            return self.request
        sampling = self.request.sampling
        return replace(
            self.request,
            prompt_ids=np.concatenate((self.request.prompt_ids, np.array(self.ids, np.int32))),
            sampling=replace(sampling, max_tokens=sampling.max_tokens - len(self.ids)),
        )

    def completion(self) -> Completion:
        """Returns the response with the tokens that have arrived. Raises RecordError for a log-prob that is not
        finite."""
        logprobs = np.array(self.logprobs, np.float32)
        if self.request.sampling.temperature == 0:
            logprobs[:] = 0  # a greedy draw has a single token of probability 1
        if not np.isfinite(logprobs).all():
            raise not_finite(self.spans[-1].version)
        return Completion(
            response_ids=np.array(self.ids, np.int32),
            logprobs=logprobs,
            spans=self.spans,
            finish_reason=self.finish_reason,
            routes=self.routes,
            sampling_mask=self.sampling_mask if self.request.masked else None,
        )
