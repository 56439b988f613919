"""The settings of a run, from model to sockets. `Run` is the root; a TOML file mirrors it."""

from typing import Annotated, Literal

from msgspec import Meta, field
from msgspec.structs import replace

from areal_q.config.buffer import BufferConfig
from areal_q.config.engines import EngineConfig, TorchEngine
from areal_q.config.environments import (
    CalculatorTool,
    EnvironmentConfig,
    PythonEnvironment,
    SingleTurn,
)
from areal_q.config.learner import LearnerConfig
from areal_q.config.struct_types import (
    AtLeastOne,
    Count,
    Fraction,
    HeldOut,
    NonNegative,
    Positive,
    Seconds,
    Seed,
    Settings,
    TaggedSettings,
    Threads,
    TokenId,
    WholeNumber,
)
from areal_q.config.tasks import (
    Arithmetic,
    Chat,
    EvalSet,
    Mix,
    Name,
    RewardConfig,
    SingleTask,
    TaskConfig,
)
from areal_q.config.trackers import TrackerConfig

FormatName = Literal[
    "bf16",
    "int8",
    "int8-weight",
    "fp8",
    "fp8-channel",
    "fp8-weight",
    "int4",
    "int4-g32",
    "int4-fp8",
    "nvfp4",
    "mxfp4",
    "nf4",
]

ROUNDS_ACTIVATIONS: tuple[FormatName, ...] = ("int8", "fp8", "fp8-channel", "int4-fp8")
"""The formats that round activations as well as weights."""
WORTH_SMOOTHING: tuple[FormatName, ...] = ("int8", "fp8-channel")
"""Those of them that are nearer to a pretrained model with `rollout.smoothing` (docs/aligned.md): one scale a
token is what outliers spoil most."""

WEIGHT_SCALES: tuple[FormatName, ...] = ("int4", "int4-g32")
"""Those that round weights alone, and may take `rollout.smoothing`: scales and clips by AWQ."""


class SmallModel(TaggedSettings, frozen=True, kw_only=True, tag="small"):
    """A Qwen3-architecture decoder made from nothing, with a character tokenizer; a mixture of experts where
    there are any."""

    layers: Count = 3
    """Decoder layers."""
    width: Count = 128
    """Width of the hidden states."""
    heads: Count = 4
    """Attention heads; each has width / heads numbers."""
    kv_heads: Count = 2
    """Heads of the keys and values, shared by groups of attention heads."""
    mlp: Count = 384
    """Width of the MLP, or of each expert."""
    experts: WholeNumber = 0
    """Experts in every layer; 0: dense."""
    experts_per_token: Count = 2
    """Experts that each token goes to."""
    max_positions: Count = 256
    """The longest prompt and response together, in tokens."""


class PretrainedModel(TaggedSettings, frozen=True, kw_only=True, tag="pretrained"):
    """A Hugging Face directory: config.json, *.safetensors, tokenizer. docs/models.md has the families."""

    path: str
    """The directory, or the model's id on the Hub, such as Qwen/Qwen2.5-0.5B-Instruct or ORG/NAME@REVISION:
    config.toml keeps the directory in the cache, whose name has the commit."""


class HfModel(PretrainedModel, frozen=True, kw_only=True, tag="hf"):
    """The same, of any family: transformers computes it, in the learner and in the engine of type hf. A
    pretrained model of a family that our own decoder does not have becomes one as its run starts."""


ModelConfig = SmallModel | PretrainedModel | HfModel


class WarmStart(Settings, frozen=True, kw_only=True):
    """Supervised steps before RL, cached by the hash of all that they depend on. 0 steps: none."""

    steps: WholeNumber = 0
    """Optimizer steps; 0 leaves the warm start out."""
    until_accuracy: Fraction = 1.0
    """Stops early once the running share of answers that greedy decoding would get right is this; 1: never."""
    batch: Count = 128
    """Problems in a step."""
    lr: Positive = 2e-3
    """Learning rate."""


class Sft(Settings, frozen=True, kw_only=True):
    """`areal-q sft`: supervised training as a run of its own. Model, optimizer, precision, backend, checkpoints
    and the number of steps are those of the other tables."""

    path: str | None = None
    """Rows with `messages`, and `tools` where there are any, or with a prompt and an answer: a file, a
    directory of save_to_disk, or a data set of the Hugging Face Hub, as in a task's `path`. None: the task's
    own problems and answers."""
    prompt: str = "prompt"
    """Name of the field: a text, or a list of messages."""
    answer: str = "answer"
    """Name of the field with the answer."""
    heldout: HeldOut | str = 0.05
    """The last share of the rows, or the last so many, or another file or data set, which are not learnt from;
    0: none."""
    template: Literal["chat", "plain"] = "chat"
    """`chat`: the tokenizer's own chat template; `plain`: prompt and answer as bare text."""
    chat: Chat = Chat()
    """The conversation."""
    batch: Count = 32
    """Rows in a step."""
    epochs: Positive | None = None
    """Passes over the rows, in place of `steps`."""
    accuracy: bool | None = None
    """Also ask the task's held-out problems, at the start and at the end; None: if they are what is learnt."""


LARGEST_TEMPERATURE = 1000.0
LARGEST_MASK = 512
"""Most tokens that one token is drawn from in training, where sampling is truncated: they are recorded"""
LARGEST_MASKS = 128 << 20
"""Most bytes that these may take of a group, half of the largest record"""
MOST_STOPS, LONGEST_STOP = 64, 1000
"""Each stop is compared with the end of a response at every token."""
StopText = Annotated[str, Meta(min_length=1, max_length=LONGEST_STOP)]
StopIds = Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=LONGEST_STOP)]


class Sampling(Settings, frozen=True, kw_only=True):
    """How a response is drawn. The recorded log-probs are those of this distribution."""

    temperature: Annotated[float, Meta(ge=0, le=LARGEST_TEMPERATURE)] = 1.0
    """0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Keeps the most probable tokens whose probabilities add up to this share; 1 keeps all."""
    top_k: WholeNumber = 0
    """0 keeps the whole vocabulary. In training with a `top_p`, `top_k` or `min_p` it is from 1 to 512."""
    min_p: Annotated[float, Meta(ge=0, lt=1)] = 0.0
    """Drops tokens less probable than this share of the most probable one; 0 drops none."""
    max_tokens: Count = 16
    """The longest response."""
    stop: Annotated[tuple[StopText | StopIds, ...], Meta(max_length=MOST_STOPS)] = ()
    """A response ends with the token that completes one of these strings in its text, or one of these
    sequences of ids; both are part of it."""

    @property
    def truncated(self) -> bool:
        """True if these settings leave tokens out."""
        return bool(self.top_k or self.top_p < 1 or self.min_p)


class KvScales(Settings, frozen=True, kw_only=True):
    """The learner measures keys and values in a part of its last batch, and publishes the scales of an FP8 KV
    cache with the weights."""

    percentile: Annotated[float, Meta(gt=0, le=100)] = 100.0
    """Percentile of the magnitudes; what lies above it and beyond the margin saturates."""
    margin: AtLeastOne = 1.5
    """Factor of room above what was measured."""
    tokens: Count = 2048
    """Tokens of the batch that are looked at, at least: whole sequences."""


class Smoothing(Settings, frozen=True, kw_only=True):
    """Scales by channel in the published weights: SmoothQuant's, which move activations' outliers there; for
    int4 and int4-g32 AWQ's, and clips of each group, chosen once. The model computes the same; the learner's
    own weights stay as they are. Of a model that transformers computes, each linear divides its own input."""

    alpha: Fraction = 0.5
    """Share of the outliers that goes into the weights: s = max|x|^alpha / max|W|^(1 - alpha). AWQ's is
    searched for each layer."""
    tokens: Count = 512
    """Tokens that are looked at, at least: whole prompts of training problems at first, then whole samples of
    the last batch."""
    every: WholeNumber = 10
    """Steps from one measurement to the next; a scale that is good enough stays. 0: only before the first."""


class Aqn(Settings, frozen=True, kw_only=True):
    """QeRL's adaptive quantization noise: in the norms of what is published, less from stage to stage."""

    sigma_start: Positive = 1e-2
    """Standard deviation of the noise in the second stage."""
    sigma_end: Positive = 5e-4
    """Standard deviation that the last stage comes to."""
    stages: Annotated[int, Meta(ge=3, le=1000)] = 10
    """Equal parts of `steps`; the first is without noise."""
    steps: WholeNumber = 0
    """0: the run's, as it is begun. A run that goes on for longer stays in the last stage."""
    schedule: Literal["exponential", "exponential-attained", "linear", "cosine", "logarithmic"] = (
        "exponential"
    )
    """`exponential` is the printed one, which ends above sigma_end; the others reach it."""


class RolloutConfig(Settings, frozen=True, kw_only=True):
    workers: Annotated[int, Meta(ge=0, le=10_000)] = 1
    """Processes started by `areal-q run`; any number more can join by `areal-q rollout`."""
    format: FormatName = "int8"
    """Number format of the published linear weights, as the engine runs them."""
    unquantized: Literal["auto", "fp32", "bf16"] = "auto"
    """Embeddings, norms, biases and output head as published. bf16: half the bytes, and nothing lost where
    the engine computes in bfloat16. auto: bf16 where the model's own config.json names bfloat16, else fp32."""
    sticky_scales: NonNegative = 0.0
    """Scales stay from version to version until the weights drift by this share; 0: always recomputed."""
    aqn: Aqn | None = None
    """Adaptive quantization noise; none leaves the weights without noise."""
    kv_scales: KvScales | None = None
    """Scales of an FP8 KV cache, measured by the learner; None: the engine measures them, for every
    version anew."""
    smoothing: Smoothing | Literal["auto", "off"] = "auto"
    """Scales by channel for a format that rounds activations. off: outliers are rounded as they come, which
    costs a pretrained model much and a small one nothing. auto: on for a pretrained model in int8 or
    fp8-channel with `learner.precision = "full"` and no LoRA, else off. "qarl" takes it in one process."""
    engine: EngineConfig = TorchEngine()
    """What generates."""
    sampling: Sampling = Sampling()
    """How a response is drawn."""
    environment: EnvironmentConfig = SingleTurn()
    """How a ticket becomes responses."""
    serve: Annotated[str, Meta(pattern=r"^(.+:)?[0-9]{1,5}$")] | WholeNumber | None = None
    """[HOST:]PORT of the OpenAI-compatible endpoint of the first worker that `areal-q run` starts; the next
    ones take the ports after it (0: any). On loopback; beyond it AREAL_Q_SERVE_TOKEN_FILE must name a token."""
    request_timeout_s: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    """A response that has been drawn for so long ends with the tokens that it has; 0: never."""
    threads: Threads = 1
    """Threads of each worker's process."""

    @property
    def rounds_rest(self) -> bool:
        """True if weights that the format does not apply to are rounded to bfloat16."""
        return self.unquantized == "bf16"

    @property
    def smooths(self) -> Smoothing | None:
        """The settings of smoothing if it is on; a run settles what `auto` is when it starts."""
        return self.smoothing if isinstance(self.smoothing, Smoothing) else None

    @property
    def tokens_after_prompt(self) -> int:
        """Most tokens that can follow a prompt: a response's own, and what its environment adds.

        Example: 16 tokens of its own and 4 calls with results of up to 12 tokens are 64."""
        tool = self.environment
        results = tool.max_calls * tool.max_result_tokens if isinstance(tool, CalculatorTool) else 0
        given = tool.max_given_tokens if isinstance(tool, PythonEnvironment) else 0
        return self.sampling.max_tokens + results + given


class BroadcastConfig(Settings, frozen=True, kw_only=True):
    """ZeroMQ endpoints that the learner binds; None takes sockets in a temporary directory, or loopback for a
    learner that was started by itself."""

    announce: str | None = None
    """Endpoint where new versions are announced and deltas are sent."""
    fetch: str | None = None
    """Endpoint where workers fetch whole versions."""
    host: str | None = None
    """The name or address under which workers reach endpoints of the form `tcp://…`; None: as they are
    bound. Needed where that is every interface, such as tcp://0.0.0.0:5551."""
    chunk_bytes: Count = 1 << 20
    """Size of the pieces in which a version is sent: those in flight should fit into the processor's cache."""
    credit: Count = 16
    """Chunks in flight to one worker: many, so that a busy machine need not wake both sides for each."""
    hold: Count = 3
    """Versions that can be fetched in full; each costs the learner's host the memory of its payload."""
    hold_deltas: WholeNumber = 8
    """Versions that a worker may be behind and still be brought up to date by deltas."""
    max_delta_bytes: WholeNumber = 64 << 20
    """A larger delta is not made use of, and all that are held together stay below it; 0: snapshots only."""
    heartbeat_s: Annotated[float, Meta(gt=0, le=60)] = 0.5
    """Between two announcements of the same version."""
    timeout_s: Seconds = 5.0
    """A worker asks again, over a new connection, when an answer has been due for so long."""
    stall_s: Seconds = 30.0
    """A sync that makes no progress for so long is logged and counted."""
    keys: str | None = None
    """A directory made by `areal-q keys`: encrypt, and admit only the workers listed there; None: neither."""


class CheckpointConfig(Settings, frozen=True, kw_only=True):
    every: Count = 50
    """Steps from one checkpoint to the next."""
    keep: Count = 2
    """Checkpoints that are kept, the newest."""
    keep_every: WholeNumber = 0
    """Keep those of every so many steps for good, so that a replay of any step begins near it; 0: none."""
    start: bool = True
    """Keep one of the start as well, so that a replay can begin there."""
    sharded: bool = False
    """Each of several processes writes its share of the optimizers' moments itself; all of them then need the
    run's directory."""


class EvalConfig(Settings, frozen=True, kw_only=True):
    every: Count = 10
    """Steps from one evaluation on held-out problems to the next."""
    problems: Count = 256
    """Held-out problems of each evaluation, at most; of a mixture, equally many of each task."""
    sets: dict[Name, EvalSet] = field(default_factory=dict)
    """Further evaluations by name."""
    best: Annotated[str, Meta(pattern=r"^(eval/.+)?$")] = ""
    """The metric that tells which version is best, such as eval/accuracy or eval/NAME/pass_at_8. A checkpoint
    is written at each evaluation that has it, and the best one is kept. An evaluation that was answered by
    weights more than learner.max_lag versions newer (1 at least) counts for none. "": none."""
    patience: WholeNumber = 0
    """After so many evaluations in a row that are no better than the best before, the run ends; 0: never."""


class Run(Settings, frozen=True, kw_only=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    """Name of the run and of its directory."""
    root: str = "runs"
    """Everything a run writes goes to `root/name`."""
    seed: Seed = 0
    """Seed of everything that is random."""
    steps: Count = 200
    """Learner steps."""
    model: ModelConfig = SmallModel()
    """The model that is trained."""
    task: TaskConfig = Arithmetic()
    """The problems, and what judges the answers."""
    reward: RewardConfig = RewardConfig()
    """What a response is worth."""
    warmstart: WarmStart = WarmStart()
    """Supervised steps before RL."""
    sft: Sft | None = None
    """Supervised training as a run of its own, which `areal-q sft` begins and `areal-q run` leaves out."""
    rollout: RolloutConfig = RolloutConfig()
    """Workers, engine and sampling."""
    learner: LearnerConfig = LearnerConfig()
    """The learner's step."""
    buffer: BufferConfig = BufferConfig()
    """The replay buffer: the groups that a step draws."""
    broadcast: BroadcastConfig = BroadcastConfig()
    """How weights reach the workers."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """When checkpoints are written, and which are kept."""
    eval: EvalConfig = EvalConfig()
    """Evaluation on held-out problems."""
    trackers: tuple[TrackerConfig, ...] = ()
    """Trackers of other projects that get the metrics, such as [{type = "wandb", project = "sums"}]."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tasks of a mixture and of the evaluation sets with problems of their own, by which
        tickets say what scores their responses; "" is the run's one task."""
        parts = sorted(self.task.sources) if isinstance(self.task, Mix) else [""]
        sets = (name for name, one in self.eval.sets.items() if one.task or one.path)
        return (*parts, *sorted(sets))

    def of(self, source: str) -> "Run":
        """Returns the run as it is to one of `sources`: with that task, its data and its reward. An evaluation
        set with another task is judged by that task."""
        if isinstance(self.task, Mix) and source in self.task.sources:
            part = self.task.sources[source]
            return replace(self, task=part.task, reward=part.reward or self.reward)
        if source not in self.eval.sets:
            return self
        one = self.eval.sets[source]
        task = one.task or self.task
        reads = one.path is not None and hasattr(task, "path")
        task = replace(task, path=one.path) if reads else task
        return replace(self, task=task, reward=self.reward.of_the_task if one.task else self.reward)

    @property
    def tasks(self) -> dict[str, SingleTask]:
        """The settings of all tasks by the dotted names of their tables."""
        of = {self.place(name): self.of(name).task for name in reversed(self.sources)}
        return {place: task for place, task in reversed(of.items()) if not isinstance(task, Mix)}

    def place(self, source: str) -> str:
        """Returns the dotted name of the table with the task of one of `sources`: "task",
        "task.sources.NAME.task" or "eval.sets.NAME.task"."""
        if isinstance(self.task, Mix) and source in self.task.sources:
            return f"task.sources.{source}.task"
        own = source in self.eval.sets and self.eval.sets[source].task is not None
        return f"eval.sets.{source}.task" if own else "task"
