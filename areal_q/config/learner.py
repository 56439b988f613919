"""The settings of the learner: batch and objective, optimizer, precision, critic, adapters, backend."""

from typing import Annotated, Literal

from msgspec import Meta

from areal_q.config.objectives import (
    Acr,
    AdvantageConfig,
    AggregationConfig,
    Gae,
    Grpo,
    ObjectiveConfig,
    ReferenceKl,
    ReinforcePlusPlus,
    TokenMean,
    ValueLoss,
    parts_of,
)
from areal_q.config.struct_types import (
    BelowOne,
    Count,
    Fraction,
    Limit,
    NonNegative,
    Positive,
    PythonCode,
    Seconds,
    Settings,
    TaggedSettings,
    Thousands,
    Threads,
    WholeNumber,
)

Precision = Literal["full", "qarl", "jet"]
Target = Annotated[str, Meta(pattern=r"^\w+$")]
PoolWeight = Annotated[int, Meta(ge=0, le=1000)]


Rate = NonNegative | Literal["auto"]
SMALL_RATE = 1.5e-4
"""The learning rate of a small model"""


class _Optimizer(TaggedSettings, frozen=True, kw_only=True):
    lr: Rate = "auto"
    """Learning rate after the warm-up; `auto` goes by the model as a run starts: 1.5e-4 for one of type small;
    for a pretrained one 5e-6, from a billion weights on 1e-6, in supervised training 2e-5, and ten times that
    for adapters."""
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: Positive = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Weight decay of matrices; norms and biases have none."""
    warmup_steps: WholeNumber = 10
    """Optimizer steps over which lr rises linearly from 0."""
    decay_steps: WholeNumber = 0
    """Optimizer steps after the warm-up over which lr falls; 0: it stays."""
    decay: Literal["cosine", "linear"] = "cosine"
    """Shape of the decay: half a cosine, or a line."""
    final: Fraction = 0.1
    """Share of lr that is left after the decay."""

    @property
    def rate(self) -> float:
        """`lr`; before a run starts, which settles what is `auto`, that of a small model."""
        return SMALL_RATE if self.lr == "auto" else self.lr


class AdamW(_Optimizer, frozen=True, kw_only=True, tag="adamw"):
    """torch's, with moments in float32 (arXiv 1711.05101)."""


class AdamW8bit(_Optimizer, frozen=True, kw_only=True, tag="adamw8bit"):
    """AdamW with moments of 8 bits in blocks (arXiv 2110.02861): 2 bytes a weight instead of 8."""

    small: WholeNumber = 4096
    """Parameters of fewer elements keep moments in float32."""


class Muon(_Optimizer, frozen=True, kw_only=True, tag="muon"):
    """Orthogonalised momentum for the linears that number formats apply to, AdamW for all else; updates are
    scaled to AdamW's usual size, so that one lr serves both (arXiv 2502.16982)."""

    momentum: BelowOne = 0.95
    """Decay rate of the momentum."""


OptimizerConfig = AdamW | AdamW8bit | Muon


class CriticConfig(Settings, frozen=True, kw_only=True):
    """A value for every response token, as `gae` needs it: a linear head on the states of a decoder."""

    trunk: Literal["separate", "shared"] = "separate"
    """`separate`: a copy of the policy's, at the start of training; `shared`: the policy's own, which the
    value loss then trains as well."""
    value: ValueLoss = ValueLoss()
    """The critic's share of the loss."""
    optimizer: AdamW = AdamW()
    """Optimizer of the head, and of a separate trunk."""


class FidelityConfig(Settings, frozen=True, kw_only=True):
    """The fidelity meter: logged log-probs beside what the same published weights give here, in float32."""

    share: Fraction = 0.015625
    """Share of the groups, 16 tickets in a row: their responses' first version is scored again. 0: none."""
    bound_nats: Positive = 0.03
    """A mean gap beyond this is warned of once, and an alert, unless the format's noise on this model
    reaches as far."""


class Lora(Settings, frozen=True, kw_only=True):
    """Adapters on a frozen base in `rollout.format` (QeRL): they alone are trained and sent."""

    rank: Count = 32
    """Rank of the adapters."""
    alpha: Positive = 32.0
    """The update is alpha / rank · B · A."""
    targets: Annotated[tuple[Target, ...], Meta(min_length=1)] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    """The linear layers that have an adapter, by the ends of their names. With these seven, of a model of type
    hf all that a number format applies to."""

    def every(self, foreign: bool) -> bool:
        """Returns True if all linear layers that a number format applies to have one. `foreign` says whether
        transformers computes the model."""
        return foreign and self.targets == Lora().targets


class TorchBackend(TaggedSettings, frozen=True, kw_only=True, tag="torch"):
    """One device; or FSDP2, where torchrun starts several learner processes, which alone heed these."""

    offload: bool = False
    """Weights, gradients and moments rest in the host's memory; needs a GPU."""
    context: Count = 1
    """Processes that share the tokens of a micro-batch, which has so many times `microbatch_tokens`: for
    responses too long for one. The rest are data parallel."""


class MegatronBackend(TaggedSettings, frozen=True, kw_only=True, tag="megatron"):
    """Megatron-core: `.venv/bin/pip install -e '.[megatron]'`. Processes = tensor · pipeline · context
    · data parallel ones."""

    tensor: Count = 1
    """Processes that share each matrix."""
    pipeline: Count = 1
    """Processes that share the layers."""
    context: Count = 1
    """Processes that share the tokens of a micro-batch, as on the torch backend."""
    experts: Count = 1
    """So many of the processes that have the same layers share the experts of a mixture."""


BackendConfig = TorchBackend | MegatronBackend


class Shuffled(TaggedSettings, frozen=True, kw_only=True, tag="shuffled"):
    """Each epoch has all problems, in another order."""


class PythonOrder(PythonCode, frozen=True, kw_only=True, tag="python"):
    """A function `order(number, problems, seed, …)` of one's own: the index of the problem of ticket `number`,
    0 for the first of the run. It depends on nothing else, since a ticket is made again where it is checked."""


class PassRate(TaggedSettings, frozen=True, kw_only=True, tag="pass-rate"):
    """A curriculum: what is solved sometimes teaches the most. Problems are in pools by the pass rate seen so
    far, a moving average in which the newest group counts half, and the pools take turns by their weights."""

    keep: tuple[Fraction, Fraction] = (0.2, 0.8)
    """Pass rates within are `medium`, those below `hard`, those above `easy`."""
    medium: PoolWeight = 4
    """Weight of these; an empty pool leaves its turns to the first of medium, new, hard and easy that is
    not."""
    new: PoolWeight = 4
    """Weight of the problems that were never scored, in the order of one shuffled epoch."""
    hard: PoolWeight = 1
    """Weight of the hard ones."""
    easy: PoolWeight = 1
    """Weight of the easy ones."""


OrderConfig = Shuffled | PythonOrder | PassRate


class _Teacher(TaggedSettings, frozen=True, kw_only=True):
    coef: Positive = 1.0
    """Weight of log π_T - log π_prox in each token's advantage; 1 is the reverse KL itself."""
    most_nats: Positive = 10.0
    """The difference is kept in ± this, so that one token that the teacher excludes does not decide a step."""


class ModelTeacher(_Teacher, frozen=True, kw_only=True, tag="model"):
    """A model of any size with the student's tokenizer, which the learner holds beside the policy."""

    path: str
    """A Hugging Face directory of any family that transformers computes, or what `areal-q quantize` wrote."""


class ServerTeacher(_Teacher, frozen=True, kw_only=True, tag="server"):
    """A server with OpenAI's completions, as vLLM and SGLang have: it is sent token ids, and answers with the
    log-probs of the prompt (`echo`). AREAL_Q_TEACHER_TOKEN_FILE names a file with its key."""

    url: Annotated[str, Meta(pattern=r"^https?://")]
    """The address before `/completions`, such as http://localhost:8000/v1."""
    model: str = ""
    """The name that the server knows the teacher by; "" is the first that it lists."""
    connections: Threads = 8
    """Requests at a time, each of one response."""
    timeout_s: Seconds = 60.0
    """After so long without an answer a request is made again."""
    retries: WholeNumber = 5
    """Times that a request without an answer is made again, after 1 s, 2 s, 4 s …; then the learner ends, and
    goes on from its checkpoint when it is started again."""


TeacherConfig = ModelTeacher | ServerTeacher


class LearnerConfig(Settings, frozen=True, kw_only=True):
    groups: Thousands = 64
    """Prompts in a step."""
    group_size: Thousands = 8
    """Responses to each prompt; 1 only where the advantage needs no others to compare with."""
    order: OrderConfig = Shuffled()
    """The rule by which the next problem is chosen."""
    max_lag: Annotated[int, Meta(ge=0, le=1000)] = 2
    """η: versions by which a token may be behind the learner when it is used. 0 is synchronous."""
    epochs: Thousands = 1
    """Passes over each batch, all against the same π_prox."""
    minibatches: Thousands = 2
    """Equal parts of a batch, with an optimizer step for each."""
    proximal: Literal["exact", "loglinear"] = "exact"
    """How π_prox is known: `exact`, by a forward pass before the first update wherever that needs one;
    `loglinear`, A-3PO's interpolation between π_behav and π_θ (arXiv 2512.06547), which needs none."""
    mask: tuple[Literal["length", "timeout"], ...] = ()
    """Responses that ended for one of these reasons, cut off by `rollout.sampling.max_tokens` or by
    `rollout.request_timeout_s`, have no loss; their rewards stay in the baseline of their group. With `length`
    this is DAPO's overlong filtering (arXiv 2503.14476 §3.4), which masks the loss of truncated samples."""
    drop_uniform: bool = False
    """DAPO's dynamic sampling: a group whose rewards are all equal carries no gradient; it is dropped and
    counted, and its place refilled."""
    oversampling: Annotated[float, Meta(ge=1, le=100)] = 1.0
    """Groups that may be outstanding, over (max_lag + 1) · groups: more keep a learner with `drop_uniform` from
    waiting. Beyond (max_lag / useful share + 1) / (max_lag + 1) they grow too old, and are dropped."""
    advantage: AdvantageConfig = Grpo()
    """How rewards become advantages."""
    objective: ObjectiveConfig = Acr()
    """What the learner maximises."""
    aggregation: AggregationConfig = TokenMean()
    """How the losses of tokens become one number."""
    entropy_coef: NonNegative = 0.0
    """Bonus for the entropy of the policy, in nats per token."""
    reference_kl: ReferenceKl | None = None
    """A penalty for leaving a reference policy; none leaves it out."""
    teacher: TeacherConfig | None = None
    """On-policy distillation: a teacher scores what the student drew (docs/distillation.md); none leaves it
    out."""
    critic: CriticConfig | None = None
    """A critic, which `advantage.type = gae` needs; none for all others."""
    optimizer: OptimizerConfig = AdamW()
    """The optimizer and its learning rate over time."""
    max_grad_norm: Limit = 1.0
    """Longer gradients are shortened to this norm."""
    max_skipped: Count = 20
    """Optimizer steps skipped in a row, for gradients that are not finite, before the learner gives up."""
    uaq: Annotated[float, Meta(ge=1, le=1000)] = 1.5
    """UAQ's scale s (QuRL §4.3); 1 turns it off."""
    precision: Precision = "full"
    """`full`; `qarl`: forward on the rollouts' own numbers, backward in full precision; `jet`: both in FP8."""
    lora: Lora | None = None
    """Train adapters alone; none trains all weights."""
    microbatch_tokens: Count = 16384
    """The most tokens of one forward and backward pass, of each of the processes that share them; fewer need
    less memory and change no result."""
    recompute: bool = False
    """Activation checkpointing: a layer keeps its input alone and runs again in the backward pass."""
    routing_replay: bool = False
    """R3: tokens go to the experts that the rollout sent them to, which workers then record."""
    router_aux_coef: NonNegative = 0.0
    """Weight of the load-balancing loss of experts (Switch, arXiv 2101.03961). 0: RL starts from a router
    that is balanced already, and this gradient moves the policy without any reward asking for it."""
    backend: BackendConfig = TorchBackend()
    """What computes the steps."""
    fidelity: FidelityConfig = FidelityConfig()
    """The check of the engine's log-probs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What layers multiply in. Weights at rest, gradients, log-probs and losses are float32 all the same. auto:
    what the GPU or the processor is fast in when the run starts, as areal_q/checks/automatic.py says; it goes
    on with that anywhere."""
    device: str = "cpu"
    """Device of the learner, such as cpu or cuda:0."""
    processes: Count = 1
    """Processes of the learner that `areal-q run` starts on this machine, by torchrun: they share the backend's
    work, each on a GPU of its own if `device` is cuda. Whoever starts them otherwise says how many there."""
    threads: Threads = 1
    """Threads of each of the learner's processes. On a CPU those of a model of at most 8 million weights
    compute micro-batches side by side, and share `microbatch_tokens`; those of a larger one divide each
    product."""

    @property
    def has_own_code(self) -> bool:
        """True if the objective, an advantage or the order is a function of the user's own."""
        own = (self.objective, self.order, *parts_of(self.advantage).values())
        return any(isinstance(it, PythonCode) for it in own)

    @property
    def products(self) -> Literal["float32", "bfloat16"]:
        """The dtype that layers multiply in: `dtype`, and float32 where nobody has settled what `auto` is."""
        return "float32" if self.dtype == "auto" else self.dtype

    @property
    def rates(self) -> tuple[Rate, Rate]:
        """The learning rates of the policy, and of the critic if there is one."""
        return self.optimizer.lr, (self.critic or self).optimizer.lr

    @property
    def pass_tokens(self) -> int:
        """The most tokens of one forward and backward pass, and of a response with its prompt: those of all
        processes that share a micro-batch."""
        return self.microbatch_tokens * self.context

    @property
    def pass_limit(self) -> str:
        """`pass_tokens` by the names of its settings, for a message."""
        shared = f" · learner.backend.context = {self.context}" if self.context > 1 else ""
        return f"learner.microbatch_tokens = {self.microbatch_tokens}{shared}"

    @property
    def context(self) -> int:
        """Number of processes that share the tokens of a micro-batch."""
        return self.backend.context

    @property
    def advantages_need_policy(self) -> bool:
        """True if advantages can be computed only after the learner's own forward pass."""
        in_reward = self.reference_kl is not None and self.reference_kl.place == "reward"
        return in_reward or isinstance(self.advantage, Gae)

    @property
    def update_scores_itself(self) -> bool:
        """True if nothing needs the learner's scores of a micro-batch before its update's own forward pass:
        neither advantages, nor counts of the whole step, nor Megatron's schedule."""
        return (
            isinstance(self.backend, TorchBackend)
            and not (self.advantages_need_policy or self.critic)
            and not self.router_aux_coef
            and getattr(self.objective, "denominator", "all_tokens") == "all_tokens"
        )

    @property
    def versions_kept(self) -> int:
        """Versions that a learner remembers: η + 2. A group drawn by any of the newest η + 1 may still be
        learnt from, and one more is on its way out meanwhile. Example: max_lag = 2: versions 7, 8 and 9 may
        have drawn what step 9 learns from, and version 10 follows: 4.

        Read by learner/build.py and learner/api/steps.py (VersionHistory), learner/measure/fidelity.py (weights
        to score with), learner/replay/replay_steps.py and areal_q/checks/memory.py (what they take). `max_lag`
        itself is read by learner/data/group_reader.py (which groups are too old), rollout/worker.py (whose
        responses a worker continues), areal_q/config/load.py (what workers are set up from),
        areal_q/observability/run_summary.py (which evaluations came too late), areal_q/plan/speed.py,
        areal_q/plan/worker_speed.py and areal_q/plan/estimate.py (what is expected), learner/doctor/probe.py
        and learner/doctor/diagnosis/gap_rules.py."""
        return self.max_lag + 2

    @property
    def max_outstanding(self) -> int:
        """The largest number of groups that are admitted and neither finished nor dropped:
        (η + 1) · groups · oversampling. Example: groups = 64, max_lag = 2: 192.

        Read by learner/data/admission.py (tickets to admit), buffer/sampling/replay_pool.py (groups to read
        ahead), areal_q/config/rules.py (what a sampler may ask for), areal_q/checks/memory.py and
        areal_q/plan/worker_speed.py (rows that a worker draws), areal_q/plan/speed.py (how old they grow)."""
        return round((self.max_lag + 1) * self.groups * self.oversampling)

    @property
    def fewest_valid(self) -> int:
        """Responses that a group must have for one of them to have an advantage: 2 where they are compared with
        each other, 1 where a critic or the batch is the baseline."""
        alone = (
            isinstance(a, Gae) or (isinstance(a, ReinforcePlusPlus) and a.baseline == "none")
            for a in parts_of(self.advantage).values()
        )
        return 1 if all(alone) else 2
