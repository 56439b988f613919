"""Translates requests to vLLM's sampling parameters, and vLLM's outputs to deltas."""

# pyright: reportMissingImports=false

from typing import Any

from areal_q.messages import VersionSpan
from rollout.engines.base import Request
from rollout.engines.process.generation_backend import CompletionDelta


def vllm_delta(output: Any) -> CompletionDelta:
    spans = None
    if output.weight_versions is not None:  # vLLM gives them with the last output only
        stamps = [(s.version.partition(":"), s.end - s.start) for s in output.weight_versions]
        spans = [VersionSpan(int(v), tokens, digest) for (v, _, digest), tokens in stamps]
    return CompletionDelta(
        ids=list(output.token_ids), logprobs=output.logprobs.logprobs, spans=spans
    )


def vllm_sampling_params(request: Request, seed: int) -> Any:
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
        stop_token_ids=sorted(request.stop_ids),
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
