"""What a model that transformers computes, `model.type = "hf"`, ranks that share a micro-batch, Megatron, and
models of ours of some families do not combine with."""

from collections.abc import Iterator

from areal_q.config import (
    AdamW,
    LearnerConfig,
    Lora,
    MegatronBackend,
    Muon,
    Run,
    ScriptedEngine,
    SglangEngine,
    TorchBackend,
    VllmEngine,
)
from areal_q.config.engines import ADDED, HfEngine, adds_exactly
from areal_q.errors import ConfigError
from areal_q.models import DecoderConfig
from areal_q.models.rope_scaling import turned_by
from areal_q.quant import is_quantized


def check_foreign(run: Run, family: str, rollouts: bool = True) -> None:
    """Raises ConfigError, which names the first setting of `run` that needs our own decoder. `family` is the
    model's. Without `rollouts`, as in supervised training, their own settings may be anything."""
    for setting, why in _refused(run):
        if rollouts or not setting.startswith("rollout."):
            raise ConfigError(f"{setting}: not with {family}, which transformers computes: {why}")


def check_family(run: Run, shape: DecoderConfig, rollouts: bool = True) -> None:
    """Raises ConfigError, which names the first setting of `run` that a model of this `shape` does not combine
    with: an engine that does not know its experts, or what scales norms by their weights alone or a product
    that is clamped, or knows no second norms, no sinks or no layers with a state. `rollouts` is as for
    `check_foreign`."""
    if rollouts and (why := _unknown_experts(run, shape)):
        tag = run.rollout.engine.__struct_config__.tag
        raise ConfigError(f"rollout.engine.type = {tag!r}: not with this {shape.family}: {why}")
    if shape.delta:
        why = "whose norms multiply by 1 + w, and whose layers keep a state"
    elif shape.offset_norms:
        why = "whose norms multiply by 1 + w"
    elif shape.sinks:
        why = "whose attention has sinks, and whose files stack experts that are clamped"
    else:
        return
    uaq, engine = run.learner.uaq, run.rollout.engine
    served = isinstance(engine, VllmEngine | SglangEngine)
    others = served or isinstance(engine, HfEngine)
    for setting, (is_set, instead) in {
        f"learner.uaq = {uaq:g}": (uaq > 1 and shape.offset_norms, "learner.uaq = 1"),
        f"rollout.engine.type = {engine.__struct_config__.tag!r}": (
            rollouts and ((served and shape.sinks) or (others and bool(shape.delta))),
            "rollout.engine.type = 'torch'",
        ),
        "rollout.smoothing": (
            rollouts and run.rollout.smooths is not None and (shape.offset_norms or shape.sinks),
            "rollout.smoothing = 'off'",
        ),
        "rollout.kv_scales": (
            rollouts and run.rollout.kv_scales is not None and bool(shape.delta),
            "the torch engine measures its own",
        ),
        "learner.backend.type = 'megatron'": (
            not isinstance(run.learner.backend, TorchBackend),
            "learner.backend.type = 'torch'",
        ),
    }.items():
        if is_set:
            raise ConfigError(f"{setting}: not with {shape.family}, {why}: {instead}")


def adaptable(shape: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the weights that adapters may be given to, by name: those of the layers of ours
    that have always had some, and in a model that transformers computes, which joins the experts of its files
    into tensors that are no layers, all other linear layers that formats apply to."""
    return {
        name: size
        for name, size in shape.tensors().items()
        if is_quantized(name)
        and (".experts." not in name if shape.foreign else name.split(".")[-2] in Lora().targets)
    }


def check_linears(shape: DecoderConfig, cfg: LearnerConfig) -> None:
    """Raises ConfigError for adapters, or for Muon, on linear layers that a model of this `shape` does not
    have."""
    lora = cfg.lora
    if lora is None:
        if isinstance(cfg.optimizer, Muon) and not any(map(is_quantized, shape.tensors())):
            raise ConfigError(
                f"learner.optimizer.type = 'muon': {shape.family} has no linear that formats apply to; 'adamw'"
            )
        return
    known = {name.split(".")[-2] for name in adaptable(shape)}
    if lora.every(shape.foreign is not None) and known:
        return
    if missing := [target for target in lora.targets if target not in known]:
        has = f"it has {', '.join(sorted(known))}" if known else "it has none that formats apply to"
        raise ConfigError(
            f"learner.lora.targets: {missing[0]} is no linear of {shape.family}: {has}"
        )


def _unknown_experts(run: Run, shape: DecoderConfig) -> str:
    """Returns why the engine would run another mixture than the model's, or none; "" if it runs this."""
    engine = run.rollout.engine
    if not shape.sparse_layers:
        return ""
    adapted = run.learner.lora is not None
    if isinstance(engine, VllmEngine) and adapted and not adds_exactly(engine, run.rollout.format):
        return f"{ADDED}; or rollout.engine.type = 'torch'"
    if isinstance(engine, VllmEngine) and shape.family == "qwen2_moe" and not shape.qkv_bias:
        return "vLLM gives q, k and v biases, which this one lacks; rollout.engine.type = 'torch'"
    if isinstance(engine, HfEngine):
        return "transformers joins the experts that are published one by one; rollout.engine.type = 'torch'"
    dense = sorted({*range(shape.layers)} - {*shape.sparse_layers})
    if isinstance(engine, SglangEngine) and dense:
        return f"SGLang takes every layer for a mixture, and its layer {dense[0]} is none"
    return ""


def _refused(run: Run) -> Iterator[tuple[str, str]]:
    """Yields (setting, reason)."""
    learner, rollout = run.learner, run.rollout
    engine = rollout.engine.__struct_config__.tag
    refused = {
        f"learner.uaq = {learner.uaq:g}": (
            learner.uaq > 1,
            "it scales norms that are known by our decoder's names; learner.uaq = 1",
        ),
        f"rollout.engine.type = {engine!r}": (
            not isinstance(rollout.engine, HfEngine | ScriptedEngine),
            "rollout.engine.type = 'hf'",
        ),
        "learner.backend.type = 'megatron'": (
            not isinstance(learner.backend, TorchBackend),
            "it is one of our decoder's",
        ),
        "learner.routing_replay": (learner.routing_replay, "its engine tells no routes"),
        "learner.router_aux_coef": (learner.router_aux_coef > 0, "its routers tell no loads"),
        "rollout.aqn": (rollout.aqn is not None, "it knows norms by our decoder's names"),
        "rollout.kv_scales": (rollout.kv_scales is not None, "its cache is float32"),
    }
    yield from ((setting, why) for setting, (is_set, why) in refused.items() if is_set)


def check_backend(run: Run, shape: DecoderConfig, ranks: int = 0) -> None:
    """Raises ConfigError if a model of this `shape` is none for the Megatron backend, or if that shape, or so
    many `ranks` (0: not known yet), cannot do what other settings ask for."""
    if isinstance(backend := run.learner.backend, MegatronBackend):
        _check_megatron(run.learner, backend, shape)
    if ranks > 1:
        check_processes(run, ranks)
    size = run.learner.context
    if size == 1:
        return
    setting = f"learner.backend.context = {size}"
    if shape.foreign is not None:
        raise ConfigError(f"{setting}: not with {shape.family}, which transformers computes")
    for what, has in {
        "a mixture of experts": shape.sparse_layers,
        "layers that keep a state": shape.delta,
    }.items():
        if has:
            raise ConfigError(f"{setting}: not with {what}; learner.backend.context = 1")
    if ranks % size:
        torchrun = f"python -m areal_q.system.torchrun --nproc-per-node {size} -m learner"
        several = f"learner.processes = {size}, or {torchrun}"
        raise ConfigError(f"{setting} does not divide {ranks} processes of the learner: {several}")


def check_processes(run: Run, size: int) -> None:
    """Raises ConfigError for a setting that `size` processes of the learner do not support."""
    cfg, backend = run.learner, run.learner.backend
    sharing = size // cfg.context
    if isinstance(backend, MegatronBackend):
        sharing //= backend.tensor * backend.pipeline
    found = {
        # If advantages need the policy, each rank computes its own, from at least one whole group.
        "learner.groups / learner.minibatches": cfg.advantages_need_policy
        and cfg.groups // cfg.minibatches < sharing,
        # A quantized forward computes in the numbers of the format.
        "learner.dtype": cfg.products == "bfloat16"
        and (cfg.precision != "full" or cfg.lora is not None),
        # Rank 0 alone has the scales by channel, which every rank's forward pass would need.
        "rollout.smoothing with learner.precision": run.rollout.smooths is not None
        and cfg.precision != "full"
        and size > 1,
    }
    if isinstance(backend, TorchBackend):
        found["learner.backend.offload"] = backend.offload and not cfg.device.startswith("cuda")
    else:
        found["learner.optimizer.type"] = not isinstance(cfg.optimizer, AdamW)
    for name, asked in found.items():
        if asked:
            kind = backend.__struct_config__.tag
            raise ConfigError(
                f"{name}: not with {size} processes of backend {kind} on {cfg.device}"
            )


def _check_megatron(cfg: LearnerConfig, backend: MegatronBackend, shape: DecoderConfig) -> None:
    """Raises ConfigError for variants of the decoder that Megatron's has not, for a model that cannot be
    divided equally among the ranks, and for settings that a mixture of experts excludes."""
    for name, asked in {
        "biases of o_proj or the MLP": shape.o_bias or shape.mlp_bias,
        "sliding windows": shape.window,
        "layers without RoPE": shape.unrotated,
        "RoPE that scales its angles' sines": turned_by(shape.rope_scaling) != 1.0,
    }.items():
        if asked:
            raise ConfigError(f"learner.backend.type = megatron: not with {name}; torch has them")
    aligned = cfg.precision != "full"
    for name, refused in {
        "learner.backend.tensor with learner.precision": backend.tensor > 1 and aligned,
        "learner.dtype": cfg.products == "bfloat16",
        "learner.recompute with learner.router_aux_coef": cfg.recompute and cfg.router_aux_coef > 0,
    }.items():
        if shape.sparse_layers and refused:
            raise ConfigError(f"{name}: not with a mixture of experts on backend megatron")
    shared = (shape.experts.shared or 0) if shape.experts else 0
    for name, ranks, what, count in (
        ("tensor", backend.tensor, "key and value heads", shape.kv_heads),
        ("tensor", backend.tensor, "channels in the MLP", shape.mlp),
        ("tensor", backend.tensor, "channels in the shared expert", shared),
        ("pipeline", backend.pipeline, "layers", shape.layers),
        ("tensor", backend.tensor, "channels", shape.width if aligned or cfg.lora else 0),
        ("experts", backend.experts, "experts", shape.experts.count if shape.experts else 0),
    ):
        if count % ranks:
            raise ConfigError(
                f"learner.backend.{name} = {ranks} does not divide the model's {count} {what}"
            )
