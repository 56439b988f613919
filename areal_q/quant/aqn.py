"""AQN, adaptive quantization noise: exploration by noise in the rollouts' norms (QeRL §3.3).

Training is cut into K stages of equal length. In stage 0 there is no noise but that of quantization; in stage
k ≥ 1 every channel of the RMSNorms before q, k, v and gate, up is published as

    w + s · Z,    Z ~ N(0, σ_k²),    with σ_k falling from σ_start towards σ_end:

    exponential            σ_start · (σ_end / σ_start)^((k - 1) / (K - 1))      as printed: ends above σ_end
    exponential-attained   σ_start · (σ_end / σ_start)^t,   t = (k - 1) / (K - 2) ∈ [0, 1]
    linear                 σ_start + (σ_end - σ_start) · t
    cosine                 σ_end + (σ_start - σ_end) · (1 + cos πt) / 2
    logarithmic            σ_start + (σ_end - σ_start) · ln(1 + (e - 1) t)

The paper draws the last three and prints no formula; these are ours. With K = 10, from 1e-2 to 5e-4, stage 9 of
the first has σ = 6.97e-4. s is UAQ's scale, by which these norms are multiplied and what they feed is divided:
with it the noise changes the function as much as it would without UAQ.

The learner's weights hold none of it. A version's manifest names σ and the seed, from which `with_noise` gives
the published norms again, bit for bit, on the same release of torch.
"""

import hashlib
import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from areal_q.config import Aqn
from areal_q.messages import Noise

_LAYER_NORM = r"(?:^|\.)layers\.\d+\.%s_layernorm\.weight$"
_NOISY = re.compile(_LAYER_NORM % "(?:input|post_attention)")
_NOISY_OF_FOUR = re.compile(_LAYER_NORM % "(?:input|pre_feedforward)")
"""The same norms of a model with four in a layer, as Gemma's; noise on w is noise on 1 + w."""


def sigma_of(cfg: Aqn, stage: int) -> float:
    """σ of stage 0 … K - 1."""
    if stage == 0:
        return 0.0
    start, end = cfg.sigma_start, cfg.sigma_end
    t = (stage - 1) / (cfg.stages - 2)
    match cfg.schedule:
        case "exponential":
            return start * (end / start) ** ((stage - 1) / (cfg.stages - 1))
        case "exponential-attained":
            return start * (end / start) ** t
        case "linear":
            return start + (end - start) * t
        case "cosine":
            return end + (start - end) * (1 + math.cos(math.pi * t)) / 2
        case "logarithmic":
            return start + (end - start) * math.log1p((math.e - 1) * t)


def noise_of(cfg: Aqn | None, version: int, seed: int) -> Noise | None:
    """Returns the noise of `version`; None for none. `cfg` is a loaded run's, with its length; `seed` the
    run's."""
    if cfg is None:
        return None
    sigma = sigma_of(cfg, min(version * cfg.stages // cfg.steps, cfg.stages - 1))
    if sigma == 0:
        return None
    digest = hashlib.blake2b(f"aqn/{seed}/{version}".encode(), digest_size=8).digest()
    return Noise(sigma=sigma, seed=int.from_bytes(digest, "little") >> 2)


def with_noise(
    state: Mapping[str, Tensor], noise: Noise | None, uaq_scale: float
) -> dict[str, Tensor]:
    """Returns `state` with `noise` in its norms, which are drawn in the order of their names; all else as it
    is."""
    out = dict(state)
    if noise is None:
        return out
    generator = torch.Generator().manual_seed(noise.seed)
    noisy = _NOISY_OF_FOUR if any("pre_feedforward_layernorm" in n for n in out) else _NOISY
    for name in sorted(n for n in out if noisy.search(n)):
        drawn = torch.randn(out[name].shape, generator=generator).mul_(noise.sigma * uaq_scale)
        out[name] = out[name].detach() + drawn.to(out[name])
    return out
