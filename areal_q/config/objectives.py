"""What the learner maximises: one Struct per choice, chosen by `type`. Equations: areal_q/algorithms.

R = π_θ/π_prox is the policy ratio, which clipping acts on; w = π_prox/π_behav is the mismatch weight,
which corrects for quantization, engine and staleness and carries no gradient.
"""

from typing import Annotated, Literal

from msgspec import Meta

from areal_q.config.struct_types import (
    LARGEST_FLOAT,
    Cap,
    Count,
    Fraction,
    Limit,
    NonNegative,
    Positive,
    PythonCode,
    Settings,
    TaggedSettings,
    WholeNumber,
)

Level = Literal["token", "product", "geometric"]
"""What a mismatch weight spans: one token, or a whole response as the product or the geometric mean of
its tokens' weights. Peers call both of the latter "sequence"."""

Denominator = Literal["all_tokens", "kept_tokens"]
"""The tokens that a mean counts: all, or only those that an objective does not mask out."""


class Clip(TaggedSettings, frozen=True, kw_only=True):
    """The trust region of the policy ratio: [1 - clip_low, 1 + clip_high]. DAPO's clip-higher: 0.2, 0.28."""

    clip_low: Fraction = 0.2
    """The ratio is clipped below 1 - clip_low."""
    clip_high: Limit = 0.2
    """The ratio is clipped above 1 + clip_high."""
    dual_clip: Annotated[float, Meta(gt=1, le=LARGEST_FLOAT)] | None = None
    """Upper bound c of the ratio where A < 0 (Ye et al. 2020, arXiv 1912.09729: 3); None: unbounded."""


class Naive(Clip, frozen=True, kw_only=True, tag="naive"):
    """PPO on π_θ/π_behav (QuRL eq. 3). Known to collapse under quantization; kept as a baseline."""


class Ppo(Clip, frozen=True, kw_only=True, tag="ppo"):
    """PPO on π_θ/π_prox, blind to π_behav (QuRL eq. 1). GRPO is this with `grpo` advantages."""


class Decoupled(Clip, frozen=True, kw_only=True, tag="decoupled"):
    """Mismatch weight times clipped policy ratio, untruncated (QuRL eq. 4, AReaL)."""


class Tis(Clip, frozen=True, kw_only=True, tag="tis"):
    """Decoupled with the mismatch weight truncated at `cap` (QuRL eq. 5)."""

    cap: Cap = 2.0
    """The mismatch weight w is truncated here."""
    level: Level = "token"
    """What the mismatch weight spans: a token, or a response as the product or the geometric mean of its
    tokens'."""


class Mis(Clip, frozen=True, kw_only=True, tag="mis"):
    """Decoupled with tokens or responses masked out where w is outside [cap_low, cap_high]."""

    cap_low: Fraction = 0.0
    """Lower end of the band of w."""
    cap_high: Cap = 2.0
    """Upper end of the band of w."""
    level: Level = "token"
    """What the mismatch weight spans: a token, or a response as the product or the geometric mean of its
    tokens'."""
    denominator: Denominator = "all_tokens"
    """The tokens that the mean counts: all, or only those that are not masked."""


class IcePop(Clip, frozen=True, kw_only=True, tag="icepop"):
    """The two-sided token mask: `mis` on tokens with IcePop's band (arXiv 2510.18855).

    Its objective was checked, M(w)·ppo(R) with M(w) = w inside [α, β] and else 0. The band [0.5, 5] is that of
    public reimplementations; the paper's own value was not seen.
    """

    cap_low: Fraction = 0.5
    """Lower end α of the band of w."""
    cap_high: Cap = 5.0
    """Upper end β of the band of w."""
    denominator: Denominator = "all_tokens"
    """The tokens that the mean counts: all, or only those that are not masked."""


class Acr(Clip, frozen=True, kw_only=True, tag="acr"):
    """TIS whose upper clip bound widens by w/cap where the weight was truncated (QuRL eq. 9)."""

    cap: Cap = 2.0
    """The mismatch weight w is truncated here."""
    max_widening: Cap | None = None
    """Ceiling on the widening factor 1/r; None leaves it unbounded, as in the paper."""


class Gspo(Clip, frozen=True, kw_only=True, tag="gspo"):
    """PPO on the geometric mean of a response's ratios (arXiv 2507.18071); blind to π_behav. The bounds are
    those that TRL's and verl's documentation give for the paper."""

    clip_low: Fraction = 3e-4
    """The response's ratio is clipped below 1 - clip_low."""
    clip_high: Limit = 4e-4
    """The response's ratio is clipped above 1 + clip_high."""


class Sapo(TaggedSettings, frozen=True, kw_only=True, tag="sapo"):
    """A sigmoid gate in place of the hard clip (arXiv 2511.20347); blind to π_behav. The temperatures are
    those of TRL and AReaL."""

    temperature_positive: Positive = 1.0
    """τ⁺, for A > 0."""
    temperature_negative: Positive = 1.05
    """τ⁻, for A ≤ 0: larger, so that negative tokens fade sooner."""


class Cispo(TaggedSettings, frozen=True, kw_only=True, tag="cispo"):
    """The ratio, truncated at 1 + clip_high, as a constant weight of A·log π_θ (arXiv 2506.13585).

    The paper has no lower bound and prints no value for the upper one. 4, a weight of at most 5, is what
    peers' recipes have (as a weight: `epsilon_high=5.0`); it was not checked against a paper.
    """

    clip_high: Limit = 4.0
    """The ratio is truncated at 1 + clip_high."""


class Tbpo(TaggedSettings, frozen=True, kw_only=True, tag="tbpo"):
    """Trust-band policy optimization (QaRL §3.2): sequence level, two-sided band where A < 0.

    The defaults are QaRL's own (appendix B), for responses of up to 16,384 tokens; shorter ones want wider
    bands: `response_tokens`. QaRL's fifth constant, seq_clip_ratio_low = 3e-4, has no field: it is the lower
    bound where A ≥ 0, which the minimum of the clipped and the unclipped term never reaches.
    """

    clip_high: Limit = 4e-4
    """Upper bound of the response's ratio - 1 where A ≥ 0."""
    negative_clip_low: Fraction = 3e-4
    """Lower end of the band, as 1 - this, where A < 0."""
    negative_clip_high: Positive = 7e-4
    """Upper end of the band, as 1 + this, where A < 0."""
    cap: Cap = 2.0
    """The response's mismatch weight is kept in [1/cap, cap]."""
    outside: Literal["drop", "clamp"] = "drop"
    """A response outside the negative band gives no gradient either way. `drop` (the paper's words) also
    takes it out of the objective's value; `clamp` lets it count with the bound's constant value."""
    response_tokens: Count | None = None
    """T of the longest responses: all three bounds are multiplied by √(16384/T), since a mean of T log-ratios
    fluctuates as 1/√T; None: they hold as they are. At T = 256 the factor is 8."""

    @property
    def bands(self) -> tuple[float, float, float]:
        """(clip_high, negative_clip_low, negative_clip_high) for responses of `response_tokens`."""
        factor = (16384 / self.response_tokens) ** 0.5 if self.response_tokens else 1.0
        low = min(self.negative_clip_low * factor, 1.0)
        return self.clip_high * factor, low, self.negative_clip_high * factor


class PythonObjective(PythonCode, frozen=True, kw_only=True, tag="python"):
    """A function `objective(x, …)` of one's own: from the log-ratios, advantages and lags of T tokens
    (`Ratios`) to J of each, [T], or to a `PolicyLoss`."""


ObjectiveConfig = (
    Naive
    | Ppo
    | Decoupled
    | Tis
    | Mis
    | IcePop
    | Acr
    | Gspo
    | Sapo
    | Cispo
    | Tbpo
    | PythonObjective
)


class Grpo(TaggedSettings, frozen=True, kw_only=True, tag="grpo"):
    """(r - mean) / (std + eps) over the responses to one prompt."""

    eps: NonNegative = 1e-6
    """Added to the standard deviation."""
    std: Literal["sample", "population"] = "sample"
    """The divisor of the variance: G - 1 (torch's default, and so the field's) or G."""


class DrGrpo(TaggedSettings, frozen=True, kw_only=True, tag="dr_grpo"):
    """r - mean over the responses to one prompt (arXiv 2503.20783)."""


class Rloo(TaggedSettings, frozen=True, kw_only=True, tag="rloo"):
    """r - mean over the other responses to the prompt (arXiv 2402.14740)."""


class ReinforcePlusPlus(TaggedSettings, frozen=True, kw_only=True, tag="reinforce++"):
    """(r - baseline), normalised over the responses of the whole batch (arXiv 2501.03262)."""

    eps: NonNegative = 1e-8
    """Added to the standard deviation."""
    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean of the prompt's responses first (the paper's "-baseline" variant)."""


class Gae(TaggedSettings, frozen=True, kw_only=True, tag="gae"):
    """Generalised advantage estimation with a critic (arXiv 1506.02438), one advantage per token."""

    discount: Fraction = 1.0
    """γ."""
    trace: Fraction = 1.0
    """λ; 1 is the return minus the value."""
    normalize: bool = True
    """Mean 0 and variance 1 over the tokens of the batch."""


class PythonAdvantage(PythonCode, frozen=True, kw_only=True, tag="python"):
    """A function `advantage(rewards, group_ids, …)` of one's own: from the rewards of N responses and the
    groups that they belong to, both [N], to their advantages, [N]."""


RewardsAdvantage = Grpo | DrGrpo | Rloo | ReinforcePlusPlus | PythonAdvantage
"""One that follows from rewards alone."""


class BySource(TaggedSettings, frozen=True, kw_only=True, tag="by_source"):
    """An advantage for each task of a mixture. What one of them normalises over the batch, it normalises over
    the responses to its own task. GAE is not among them: its critic is of all responses."""

    sources: Annotated[dict[str, RewardsAdvantage], Meta(min_length=1)]
    """The advantages by the tasks' names."""
    otherwise: RewardsAdvantage = Grpo()
    """The advantage of the tasks that are not named, together."""


AdvantageConfig = Grpo | DrGrpo | Rloo | ReinforcePlusPlus | Gae | PythonAdvantage | BySource


def parts_of(cfg: AdvantageConfig) -> dict[str, RewardsAdvantage | Gae]:
    """Returns the advantages in a table by their dotted names in it, sorted; "" is the table itself."""
    if not isinstance(cfg, BySource):
        return {"": cfg}
    named = {f"sources.{name}": cfg.sources[name] for name in sorted(cfg.sources)}
    return {"otherwise": cfg.otherwise, **named}


class TokenMean(TaggedSettings, frozen=True, kw_only=True, tag="token_mean"):
    """Sum over all tokens / number of tokens (DAPO)."""


class SeqMeanTokenMean(TaggedSettings, frozen=True, kw_only=True, tag="seq_mean_token_mean"):
    """Mean over the tokens of each response, then over responses (GRPO)."""


class SeqMeanTokenSumNorm(TaggedSettings, frozen=True, kw_only=True, tag="seq_mean_token_sum_norm"):
    """Sum over the tokens of each response / `length`, then mean over responses (Dr.GRPO)."""

    length: Count
    """Constant number of tokens, usually the longest response allowed."""


AggregationConfig = TokenMean | SeqMeanTokenMean | SeqMeanTokenSumNorm


class ReferenceKl(Settings, frozen=True, kw_only=True):
    """A penalty for leaving the frozen reference policy, a copy of which the learner holds."""

    coef: Positive = 1e-3
    """Weight of the penalty."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """The estimate, where d = log π_ref - log π_θ: -d, d²/2 or exp(d) - d - 1. In the loss, k1's gradient has
    mean 0."""
    place: Literal["loss", "reward"] = "loss"
    """`reward`: coef · KL(π_prox‖π_ref) is subtracted before advantages are computed: token by token for
    GAE, its sum over the response from the response's reward for all others."""
    path: str | None = None
    """A Hugging Face directory of the reference; None: the policy at the start of training."""
    reset_every: WholeNumber = 0
    """Learner steps after which the present policy becomes the reference; 0: never."""


class ValueLoss(Settings, frozen=True, kw_only=True):
    """The critic's share of the loss."""

    coef: Positive = 0.5
    """Weight of the value loss."""
    clip: NonNegative = 0.2
    """Half-width of the band around the old value inside which the clipped value moves; 0: no clipping."""


class Overlong(Settings, frozen=True, kw_only=True):
    """DAPO's soft length penalty: 0 up to max_tokens - cache_tokens, falling to -1 at max_tokens."""

    max_tokens: Count
    """The length at which the penalty is -1."""
    cache_tokens: Count
    """The penalty begins so many tokens before that."""
