"""Checks over HTTP, before the first request, that an SGLang server does what a worker needs."""

from typing import Any

from areal_q.config import SglangEngine
from areal_q.errors import ConfigError, EngineDied
from areal_q.system.credentials import shown
from rollout.engines.process.checkpoint_backend import UNQUANTIZED
from rollout.engines.sglang_backend.http_client import SglangClient
from rollout.engines.sglang_backend.server_main import LINEARS

PROBE_TEMPERATURE = 0.3
PROBE_TOKENS = 8
LOGPROB_GAP = 0.05
"""Tolerance in nats. BF16 rounding stays below it, and log-probs from before the temperature are far above."""


def check_settings(info: dict[str, Any], config: SglangEngine) -> None:
    """Raises ConfigError for a running server whose version or settings the adapter cannot work with."""
    where = f"rollout.engine.url: {shown(config.url or '')}"
    if "sampling_mask_max_tokens" not in info:
        raise ConfigError(f"{where} is SGLang {info.get('version')}; 0.5.23 or newer is needed")
    if config.seeded and not info["enable_deterministic_inference"]:
        raise ConfigError(
            f"{where} draws without seeds: start it with --enable-deterministic-inference, "
            "or set rollout.engine.seeded = false"
        )
    if config.kv_on_update == "keep" and not info["disable_overlap_schedule"]:
        raise ConfigError(
            f"{where} overlaps steps, so that a token could carry another version than it was drawn "
            "with: start it with --disable-overlap-schedule, or set kv_on_update = 'recompute'"
        )
    if info.get("speculative_algorithm"):
        raise ConfigError(f"{where} drafts tokens, whose log-probs are not those of the model")


async def check_logprobs(client: SglangClient, most_masked: int) -> None:
    """Raises ConfigError if the server reports log-probs from before the temperature
    (SGLANG_RETURN_ORIGINAL_LOGPROB), which are not those of the distribution that it draws from."""
    probe = {
        "input_ids": [0],
        "sampling_params": {
            "temperature": PROBE_TEMPERATURE,
            "top_k": most_masked,
            "max_new_tokens": PROBE_TOKENS,
            "ignore_eos": True,
        },
        "return_logprob": True,
        "return_sampling_mask": True,
    }
    meta = (await client.post("/generate", probe))["meta_info"]
    reported = [value for value, *_ in meta["output_token_logprobs"]]
    drawn = meta["output_token_sampling_logprobs"]
    gap = max(abs(a - b) for a, b in zip(reported, drawn, strict=True))
    if gap > LOGPROB_GAP:
        raise ConfigError(
            f"rollout.engine.url: {shown(client.url)} reports log-probs {gap:.2f} nats from those of the "
            "distribution that draws: SGLANG_RETURN_ORIGINAL_LOGPROB must not be set"
        )


async def linears(client: SglangClient, info: dict[str, Any], format: str) -> dict[str, str]:
    """Returns, by the name of each linear layer in the decoder, the class that really computes it.

    A server started by rollout/engines/sglang_backend/server_main.py reports the classes. Another server only
    lists its tensors, which show that a layer without scales is not quantized. Raises ConfigError for a format
    that the list does not show.
    """
    if LINEARS in info:
        return info[LINEARS]
    if format == "fp8":
        raise ConfigError(
            "rollout.format: whether a server runs fp8 cannot be seen from outside, unless it was "
            "started by `python -m rollout.engines.sglang_backend.server_main`"
        )
    told = await client.post("/weights_checker", {"action": "checksum"})
    names = {name for rank in told["ranks"] for name in rank["checksums"]}
    found = {name for name in names if ".layers." in name and name.endswith("_proj.weight")}
    if not found:
        raise EngineDied("SGLang names no linear among its tensors")
    return {
        name: "scaled" if f"{name}_scale" in names else UNQUANTIZED[0] for name in sorted(found)
    }
