"""Translates requests to vLLM's sampling parameters, and vLLM's outputs to deltas."""

# pyright: reportMissingImports=false

from typing import Any

import numpy as np

from areal_q.messages import VersionSpan
from rollout.engines.base import Request
from rollout.engines.process.generation_backend import CompletionDelta


def vllm_delta(output: Any, masked: bool) -> CompletionDelta:
    """Returns the tokens of an output. Each has its own log-prob, and after that those of the largest that were
    asked for; where vLLM has joined outputs, without its own once more."""
    spans = None
    if output.weight_versions is not None:  # vLLM gives them with the last output only
        stamps = [(s.version.partition(":"), s.end - s.start) for s in output.weight_versions]
        spans = [VersionSpan(int(v), tokens, digest) for (v, _, digest), tokens in stamps]
    told, mask = output.logprobs, []
    if masked:
        ids, left = np.array(told.token_ids, np.int32), np.array(told.logprobs) > -np.inf
        places = map(slice, told.start_indices, told.end_indices)
        mask = [np.unique(ids[at][left[at]]) for at in places]
    return CompletionDelta(
        ids=list(output.token_ids),
        logprobs=[told.logprobs[i] for i in told.start_indices],
        spans=spans,
        sampling_mask=mask,
    )


def vllm_sampling_params(request: Request, seed: int, vocab_size: int) -> Any:
    """Returns vLLM's form of the request. What each token was drawn from is asked for as the `top_k` largest
    log-probs, of which those that are left are finite. vLLM refuses stop ids that no token has."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = request.sampling
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=seed & (2**63 - 1),
        max_tokens=sampling.max_tokens,
        stop_token_ids=sorted(i for i in request.stop_ids if i < vocab_size),
        ignore_eos=True,
        logprobs=min(sampling.top_k, vocab_size) if request.masked else 0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
