"""Translates a request for one response to SGLang's fields, and SGLang's chunks to deltas."""

import base64
from typing import Any

import numpy as np

from areal_q.config import Sampling
from areal_q.errors import EngineDied, RecordError
from areal_q.messages import VersionSpan
from areal_q.models import DecoderConfig
from rollout.engines.base import Request
from rollout.engines.process.generation_backend import CompletionDelta
from rollout.engines.sglang_backend.http_client import Chunk, Meta


def kept_tokens(sampling: Sampling, vocab_size: int) -> int:
    """Returns the largest number of tokens that top-k, top-p and min-p may leave to draw from; 0 if none of
    them is set or the temperature is 0."""
    if sampling.temperature == 0 or not sampling.truncated:
        return 0
    return min(sampling.top_k or vocab_size, vocab_size)


def sglang_sampling_params(request: Request, seed: int, kept: int) -> dict[str, Any]:
    sampling = request.sampling
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": kept or -1,
        "min_p": sampling.min_p,
        "sampling_seed": seed & (2**63 - 1),
        "max_new_tokens": sampling.max_tokens,
        "stop_token_ids": sorted(request.stop_ids),
        "ignore_eos": not request.stop_ids,  # True would make SGLang ignore stop_token_ids as well
        # These are named since a running server may have other defaults.
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
    }


def check_end(chunk: Chunk, meta: Meta, request: Request) -> None:
    """Raises RecordError for a request that SGLang refuses, or a response that it ended with a token that is no
    stop id of the request. Raises EngineDied for a response that it aborted."""
    end = meta.finish_reason
    if end is not None and end.type == "abort" and end.status_code == 400:
        raise RecordError(f"SGLang refuses the request: {end.message}")
    if end is not None and end.type == "abort":
        raise EngineDied(f"SGLang gave a response up: {end.message}")
    last = chunk.output_ids[-1:]
    if end is not None and end.type == "stop" and not request.stop_ids.issuperset(last):
        raise RecordError(
            f"SGLang ends responses with {last}, a token that the request does not name: "
            """start it with --json-model-override-args '{"eos_token_id": null}'"""
        )


def sglang_delta(
    chunk: Chunk, meta: Meta, new: int, request: Request, model: DecoderConfig
) -> CompletionDelta:
    """Returns the last `new` tokens of a chunk. Raises EngineDied if it lacks their log-probs, or where that is
    asked for, what they were drawn from."""
    start = len(chunk.output_ids) - new
    masks = meta.output_token_sampling_mask[start:] if request.masked else []
    if kept_tokens(request.sampling, model.vocab_size):
        logprobs = meta.output_token_sampling_logprobs[start:]
    else:
        logprobs = [np.nan if v is None else v for v, *_ in meta.output_token_logprobs[start:]]
    if start < 0 or len(logprobs) != new or len(masks) != new * request.masked:
        told = f"{len(logprobs)} log-probs and {len(masks)} sampling masks"
        raise EngineDied(f"SGLang: {told} for {new} tokens")
    spans = [_span(s.version, s.end - s.start) for s in meta.weight_versions]
    return CompletionDelta(
        ids=chunk.output_ids[start:],
        logprobs=logprobs,
        spans=spans or None,
        routes=_routes(meta.routed_experts, model),
        sampling_mask=[np.sort(np.array(ids, np.int32)) for ids in masks],
    )


def _routes(told: str | None, model: DecoderConfig) -> np.ndarray | None:
    if told is None or model.experts is None:
        return None
    try:
        of_layers = np.frombuffer(base64.b64decode(told), np.int32)
        of_layers = of_layers.reshape(-1, model.layers, model.experts.per_token)
    except ValueError as error:
        raise EngineDied(f"SGLang's routes are not those of this model: {error}") from error
    dtype = np.uint8 if model.experts.count <= 256 else np.uint16
    return of_layers[:, list(model.sparse_layers)].astype(dtype)


def _span(stamp: str, tokens: int) -> VersionSpan:
    version, _, digest = stamp.partition(":")
    if not version.isdigit() or not digest:
        raise EngineDied(f"SGLang's tokens are of weights {stamp!r}, which are not ours")
    return VersionSpan(int(version), tokens, digest)
