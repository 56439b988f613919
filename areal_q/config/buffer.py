"""The settings of the replay buffer: which groups a step draws, how often, and what leaves unused."""

from areal_q.config.struct_types import (
    AtLeastOne,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PythonCode,
    Settings,
    TaggedSettings,
    WholeNumber,
)

SHORTEST_CLAIM_S = 3.0
"""Three heartbeats of a worker (HEARTBEAT_S in rollout/worker.py)."""
LONGEST_CLAIM_S = 1e7
"""Some months: below the idle time that marks a ticket as handed back (buffer/redis_store/keys.py)."""


class Fifo(TaggedSettings, frozen=True, kw_only=True, tag="fifo"):
    """In the order of their commits, each once."""


class Freshest(TaggedSettings, frozen=True, kw_only=True, tag="freshest"):
    """The newest first, each once: by the largest lag of a token, then by the latest commit. What is passed
    over until it is too old was drawn for nothing."""


class Uniform(TaggedSettings, frozen=True, kw_only=True, tag="uniform"):
    """Replay: any of the window with equal chance. The window is what `learner.max_lag` and
    `buffer.removal` leave."""

    max_uses: Count = 2
    """Steps in which a group may be used (Reverb's max_times_sampled)."""
    min_groups: WholeNumber = 0
    """Groups that must be there before a step draws (Reverb's MinSize); at least `learner.groups`."""


class Prioritized(TaggedSettings, frozen=True, kw_only=True, tag="prioritized"):
    """Replay by priority p = mean over responses of |reward − mean reward of the group| + floor, with chance
    ∝ p^alpha; the advantages of a group drawn with chance P are multiplied by (N·P)^-beta, over the largest
    of the batch (arXiv 1511.05952 §3.3–3.4)."""

    max_uses: Count = 2
    """Steps in which a group may be used (Reverb's max_times_sampled)."""
    min_groups: WholeNumber = 0
    """Groups that must be there before a step draws (Reverb's MinSize); at least `learner.groups`."""
    alpha: NonNegative = 0.6
    """0 is uniform."""
    beta: Fraction = 0.4
    """The exponent at the first step."""
    beta_final: Fraction = 1.0
    """The exponent at the last step, reached in a straight line; 1 corrects in full."""
    floor: Positive = 0.01
    """Keeps a group of equal rewards from never being drawn."""


class PythonSampler(PythonCode, frozen=True, kw_only=True, tag="python"):
    """A function `sampler(held, count, progress, rng, …)` of one's own: which `count` groups of those `held` a
    step learns from, as indices, or (indices, weights). `rng` follows from seed and step."""

    max_uses: Count = 1
    """Steps in which a group may be used (Reverb's max_times_sampled)."""
    min_groups: WholeNumber = 0
    """Groups that must be there before a step draws (Reverb's MinSize); at least `learner.groups`."""


SamplerConfig = Fifo | Freshest | Uniform | Prioritized | PythonSampler


class Removal(Settings, frozen=True, kw_only=True):
    """What leaves the buffer, the oldest first, though it may still be drawn. None: no such bound. It frees its
    place, is counted, and goes from Redis with the next checkpoint."""

    max_age_s: AtLeastOne | None = None
    """The oldest group, since it was committed, by Redis's clock. It must be well above what the groups of a
    step and the step itself take, since no step is made of groups that leave before."""
    max_groups: Count | None = None
    """Groups in the buffer."""
    max_bytes: Count | None = None
    """The size of all records; never below the groups that a step needs."""


class BufferConfig(Settings, frozen=True, kw_only=True):
    sampler: SamplerConfig = Fifo()
    """The rule by which a step draws groups, and how often."""
    removal: Removal = Removal()
    """What leaves the buffer unused."""
    claim_timeout_s: Positive = 30.0
    """A ticket whose worker was silent for so long goes to another."""
    max_deliveries: Count = 5
    """Workers that may fall silent over a ticket before it goes to the quarantine."""
    log: bool = True
    """Write every consumed group to `runs/NAME/trajectories/` as Parquet."""
    tokens: bool = True
    """Also write what the learner computed for each token (log π_prox, log π_θ, entropy) to `tokens/`."""
