"""The settings of a run: frozen Structs, a tagged union per choice, from TOML. Imports no torch."""
# ruff: noqa: I001  (isort would give each of the names that are handed on an import of its own)

from areal_q.config.buffer import (
    BufferConfig as BufferConfig,
    Fifo as Fifo,
    Freshest as Freshest,
    Prioritized as Prioritized,
    Removal as Removal,
    SamplerConfig as SamplerConfig,
    Uniform as Uniform,
)
from areal_q.config.engines import (
    ScriptedEngine as ScriptedEngine,
    SglangEngine as SglangEngine,
    TorchEngine as TorchEngine,
    VllmEngine as VllmEngine,
)
from areal_q.config.environments import (
    CalculatorTool as CalculatorTool,
    EnvironmentConfig as EnvironmentConfig,
    External as External,
    SingleTurn as SingleTurn,
)
from areal_q.config.load import (
    dump_toml as dump_toml,
    load as load,
    override as override,
    parse as parse,
    settings_hash as settings_hash,
    workers_hash as workers_hash,
)
from areal_q.config.learner import (
    AdamW as AdamW,
    AdamW8bit as AdamW8bit,
    BackendConfig as BackendConfig,
    CriticConfig as CriticConfig,
    LearnerConfig as LearnerConfig,
    Lora as Lora,
    MegatronBackend as MegatronBackend,
    Muon as Muon,
    OptimizerConfig as OptimizerConfig,
    TorchBackend as TorchBackend,
)
from areal_q.config.objectives import (
    Acr as Acr,
    AdvantageConfig as AdvantageConfig,
    AggregationConfig as AggregationConfig,
    Cispo as Cispo,
    Decoupled as Decoupled,
    DrGrpo as DrGrpo,
    Gae as Gae,
    Grpo as Grpo,
    Gspo as Gspo,
    IcePop as IcePop,
    Mis as Mis,
    Naive as Naive,
    ObjectiveConfig as ObjectiveConfig,
    Overlong as Overlong,
    Ppo as Ppo,
    ReferenceKl as ReferenceKl,
    ReinforcePlusPlus as ReinforcePlusPlus,
    Rloo as Rloo,
    Sapo as Sapo,
    SeqMeanTokenMean as SeqMeanTokenMean,
    SeqMeanTokenSumNorm as SeqMeanTokenSumNorm,
    Tbpo as Tbpo,
    Tis as Tis,
    TokenMean as TokenMean,
    ValueLoss as ValueLoss,
)
from areal_q.config.run import (
    Aqn as Aqn,
    BroadcastConfig as BroadcastConfig,
    CheckpointConfig as CheckpointConfig,
    EvalConfig as EvalConfig,
    KvScales as KvScales,
    ModelConfig as ModelConfig,
    PretrainedModel as PretrainedModel,
    RolloutConfig as RolloutConfig,
    Run as Run,
    Sampling as Sampling,
    SmallModel as SmallModel,
    WarmStart as WarmStart,
)
from areal_q.config.tasks import (
    Arithmetic as Arithmetic,
    Calculator as Calculator,
    Chat as Chat,
    Choice as Choice,
    Countdown as Countdown,
    Gsm8k as Gsm8k,
    Jsonl as Jsonl,
    Math as Math,
    Python as Python,
    RewardConfig as RewardConfig,
    TaskConfig as TaskConfig,
    ToolCalculator as ToolCalculator,
)
