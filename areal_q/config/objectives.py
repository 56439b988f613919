"""What the learner maximises: one Struct per objective and per advantage estimator, chosen by `type`."""

from typing import Literal

from msgspec import Struct

from areal_q.config.bounds import AtLeastOne, Fraction, NonNegative, Positive


class _Choice(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    pass


class Clip(_Choice, frozen=True, kw_only=True):
    """The trust region of the policy ratio: [1 - clip_low, 1 + clip_high]."""

    clip_low: Fraction = 0.2
    clip_high: Positive = 0.2


class Naive(Clip, frozen=True, kw_only=True, tag="naive"):
    """PPO on π_θ/π_behav (QuRL eq. 3). Known to collapse under quantization; kept as a baseline."""


class Ppo(Clip, frozen=True, kw_only=True, tag="ppo"):
    """PPO on π_θ/π_prox, blind to π_behav (QuRL eq. 1)."""


class Decoupled(Clip, frozen=True, kw_only=True, tag="decoupled"):
    """Mismatch weight times clipped policy ratio, untruncated (QuRL eq. 4, AReaL)."""


class Tis(Clip, frozen=True, kw_only=True, tag="tis"):
    """Decoupled with the mismatch weight truncated at `cap` (QuRL eq. 5)."""

    cap: AtLeastOne = 2.0
    level: Literal["token", "product", "geometric"] = "token"


class Acr(Clip, frozen=True, kw_only=True, tag="acr"):
    """TIS whose upper clip bound widens by w/cap where the weight was truncated (QuRL eq. 9)."""

    cap: AtLeastOne = 2.0
    max_widening: AtLeastOne | None = None
    """Ceiling on the widening factor 1/r; None leaves it unbounded, as in the paper."""


ObjectiveConfig = Naive | Ppo | Decoupled | Tis | Acr


class Grpo(_Choice, frozen=True, kw_only=True, tag="grpo"):
    """(r - mean) / (std + eps) over the responses to one prompt."""

    eps: NonNegative = 1e-6


AdvantageConfig = Grpo

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
