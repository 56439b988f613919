"""Checks whether model, tokenizer, problems and settings fit together, before a weight is read.

The learner calls `check_fit` as it starts; `areal-q check` and the launcher call `check_model`, which begins
with what the learner does before that.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_q.checks.automatic import why_rate
from areal_q.checks.combinations import (
    check_backend,
    check_family,
    check_foreign,
    check_linears,
)
from areal_q.checks.format_advice import format_of
from areal_q.checks.machine import CheckResult
from areal_q.checks.memory import cached_pages, memory_of, position_bytes
from areal_q.config import (
    HfEngine,
    HfModel,
    LearnerConfig,
    ModelTeacher,
    PretrainedModel,
    PythonEnvironment,
    Run,
    SingleTurn,
    TorchEngine,
    VllmEngine,
)
from areal_q.config.engines import HF_IGNORES, PAGE, pages_of_group
from areal_q.config.tasks import chat_of
from areal_q.errors import CheckpointError, ConfigError, QuantizationError, TaskError
from areal_q.models import DecoderConfig
from areal_q.models.foreign import computing
from areal_q.models.hf.foreign_files import check_foreign_class, check_recompute
from areal_q.models.hf.vllm_shapes import vllm_refuses
from areal_q.models.hf.weight_files import check_tensors
from areal_q.models.shape import check_frozen, config_at, shape_of
from areal_q.observability.learning_faults import has_template
from areal_q.quant import is_quantized
from areal_q.quant.linears import check_inputs
from areal_q.tasks import (
    CharTokenizer,
    Task,
    Tokenizer,
    build_task,
    build_tokenizer,
    columns_for,
    load_tokenizer,
)
from areal_q.tasks.environments.own_class import load_environment
from areal_q.tasks.environments.tools import check_tools, signature_of
from areal_q.tasks.ordering.order import try_out as try_out_order
from areal_q.tasks.prompt_lengths import without_long
from areal_q.tasks.stops import stops_text

PROBE = "12+34= and the quick, brown fox\n\tüber 日本 {x: 'y'}"
"""A text that two tokenizers encode alike if they are one"""
MOST_SHOWN = 300
"""Characters of a prompt that are shown"""
LARGE, STEEP = 50_000_000, 5e-5
"""Parameters from which a trained model has a rate of its own, and the rate from which it is warned of. Chosen:
5e-6 teaches 135M parameters, 1e-6 is usual for large models; 1.5e-4 is the built-in model's."""


class FoundModel(Struct, frozen=True):
    """A model that a run can start with, and what it makes of the run's problems."""

    shape: DecoderConfig
    tokenizer: Tokenizer
    prompt: Sequence[int]
    """Token ids of the first problem's prompt"""
    longest: int
    """Most tokens that a prompt may have"""
    problems: int
    """Number of problems, held-out ones included"""
    left_out: int
    """Number of those whose prompts are longer"""
    tools: str
    """Those of the user's own environment, with their parameters; "" without any"""


def check_model(run: Run) -> FoundModel:
    """Returns what was found. Raises UserError, in the words of the learner, for a model that it would refuse,
    except for one whose weights are not finite: no tensor is read. So it does for an objective, advantage or
    order of the user's own that cannot be called, and in a worker's words for tools that the model cannot be
    shown."""
    if run.learner.has_own_code:
        from areal_q.algorithms.python_code import try_out  # imports torch

        try_out(run.learner.objective, run.learner.advantage)
    tokenizer = build_tokenizer(run.model, run.task)
    task = build_task(run.task, columns_for(run))
    try_out_order(run.learner.order, task.train, run.seed)
    shape = shape_of(run.model, tokenizer)
    kl = run.learner.reference_kl
    if kl and kl.path:
        reference = config_at(run.model, kl.path)
        check_reference(reference, shape, kl.path)
        if reference.foreign is None:
            check_tensors(kl.path, reference)
        else:
            check_foreign_class(reference, kl.path)
    processes = run.learner.processes
    kept = check_fit(run, shape, tokenizer, task, processes if processes > 1 else 0)
    if isinstance(run.learner.teacher, ModelTeacher):
        check_teacher(run.learner.teacher.path, tokenizer)
    environment, tools = run.rollout.environment, []
    if isinstance(environment, PythonEnvironment) and run.rollout.workers:
        own = load_environment(environment.path, environment.settings)
        tools = [tool.described for tool in own.tools.values()]
        check_tools(tools, tokenizer, environment, chat_of(run.task))
    return FoundModel(
        shape=shape,
        tokenizer=tokenizer,
        prompt=tokenizer.encode_prompt(task.train[0].asked),
        longest=longest_prompt(run, shape),
        problems=len(task.train) + len(task.heldout),
        left_out=len(task.train) - len(kept.train) + len(task.heldout) - len(kept.heldout),
        tools=", ".join(map(signature_of, tools)),
    )


def findings(run: Run, found: FoundModel) -> Iterator[CheckResult]:
    """Yields what the model of `run` is, what ends its replies, a prompt as it reads it, and its memory."""
    shape, tokenizer = found.shape, found.tokenizer
    where = f"{run.model.path}: " if isinstance(run.model, PretrainedModel) else ""
    by = "" if shape.foreign is None else " by transformers"
    told = f"{shape.family}{by}, {shape.weights:,} parameters, {shape.max_positions} positions"
    yield CheckResult("model", "ok", where + told)
    yield CheckResult(
        "tokenizer",
        "ok",
        f"{tokenizer.vocab_size} tokens, embedding {shape.vocab_size}; {stops_text(tokenizer.stops)}",
    )
    text = tokenizer.decode(list(found.prompt))
    shown = text if len(text) <= MOST_SHOWN else f"{text[:MOST_SHOWN]}…"
    yield CheckResult("prompt", "ok", f"{len(found.prompt)} tokens: {shown!r}")
    if isinstance(run.model, PretrainedModel) and not chat_of(run.task) and has_template(run.model):
        says = "the model has a chat template, and is asked without"
        yield CheckResult(
            "template", "warning", says, 'task.template = "chat", unless a base model is meant'
        )
    if found.tools:
        yield CheckResult("tools", "ok", found.tools)
    room = f"up to {found.longest} tokens fit before {run.rollout.tokens_after_prompt} more"
    if found.left_out:
        says = f"{room}; {found.left_out} of {found.problems} are longer and left out"
        yield CheckResult("prompts", "warning", says, "a smaller rollout.sampling.max_tokens")
    else:
        yield CheckResult("prompts", "ok", room)
    yield from format_of(run)
    yield from rate_of(run, shape)
    yield from memory_of(run, shape, len(found.prompt))


def rate_of(run: Run, shape: DecoderConfig) -> Iterator[CheckResult]:
    """Yields the rate that was chosen for a pretrained model, or a warning if all weights of a large one would
    be learnt as fast as a small one's."""
    lr = run.learner.optimizer.rate
    trained = isinstance(run.model, PretrainedModel) and not run.learner.lora
    if chosen := why_rate(run):
        yield CheckResult("learning rate", "ok", chosen)
    elif trained and shape.weights > LARGE and lr > STEEP:
        says = f"learner.optimizer.lr = {lr:g} is for small models; here are {shape.weights:,} parameters"
        yield CheckResult("learning rate", "warning", says, "learner.optimizer.lr=1e-6 to 1e-5")


def check_fit(
    run: Run, shape: DecoderConfig, tokenizer: Tokenizer, task: Task, ranks: int = 0
) -> Task:
    """Returns `task` without the problems whose prompts are too long. Raises ConfigError for settings, or a
    number of `ranks` (0: not known yet), that do not fit a model of this `shape`, CheckpointError for weights
    or a tokenizer that do not, and TaskError if the chat template refuses a problem or none is left."""
    check_shape(run, shape, ranks)
    check_format(shape, run.rollout.format)
    prompt = tokenizer.encode_prompt(task.train[0].asked)
    check_engine(shape, run, len(prompt))
    check_vocabulary(shape, tokenizer, prompt)
    return without_long(task, tokenizer, longest_prompt(run, shape))


def check_shape(run: Run, shape: DecoderConfig, ranks: int, rollouts: bool = True) -> None:
    """Raises ConfigError for settings, or a number of `ranks` (0: not known yet), with which no model of this
    `shape` is learnt, and CheckpointError for weights that are not of it. `rollouts` is as for
    `check_foreign`."""
    if shape.foreign is not None:
        check_foreign(run, shape.family, rollouts)
        if isinstance(run.model, HfModel):
            check_foreign_class(shape, run.model.path)
        if run.learner.recompute:
            check_recompute(shape)
    else:
        check_family(run, shape, rollouts)
        if isinstance(run.model, PretrainedModel):
            check_tensors(run.model.path, shape)
    check_backend(run, shape, ranks)
    check_experts(shape, run.learner)
    check_linears(shape, run.learner)


def check_vocabulary(shape: DecoderConfig, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
    """Raises CheckpointError if a prompt can hold a token that the embedding lacks, or the token that ends a
    response is such a one, and TaskError if `prompt`, that of a problem, has no token.

    A special token beyond the embedding may remain: many a model has one for padding, which is never read.
    """
    if not prompt:
        raise TaskError("the first problem's prompt has no token")
    size = shape.vocab_size
    beyond = set(range(size, tokenizer.vocab_size)) - tokenizer.special_ids
    beyond |= {id for id in (*prompt, tokenizer.eos_id) if id >= size}
    if beyond:
        raise CheckpointError(
            f"the tokenizer is not that of the model: it has {tokenizer.vocab_size} tokens, the embedding "
            f"{size}, which lacks {tokenizer.decode([min(beyond)])!r}"
        )


def longest_prompt(run: Run, shape: DecoderConfig) -> int:
    """Returns how many tokens a prompt may have: the model, its teacher, the engine and a micro-batch must have
    room for the longest response too. Raises ConfigError if they have no room even for that, and what
    `teacher_shape` raises."""
    engine = run.rollout.engine
    positions = getattr(engine, "max_positions", 0)
    bounds = {
        f"the model's {shape.max_positions} positions": shape.max_positions,
        run.learner.pass_limit: run.learner.pass_tokens,
        f"rollout.engine.max_positions = {positions}": positions or shape.max_positions,
    }
    if isinstance(teacher := run.learner.teacher, ModelTeacher):
        positions = teacher_shape(teacher.path).max_positions
        bounds[f"the teacher's {positions} positions"] = positions
    if isinstance(engine, TorchEngine) and engine.kv_cache_bytes:
        bounds[f"rollout.engine.kv_cache_bytes = {engine.kv_cache_bytes}"] = _cached(
            run, engine, shape
        )
    most = min(bounds, key=bounds.__getitem__)
    room = bounds[most] - run.rollout.tokens_after_prompt
    if room < 1:
        asked = f"rollout.sampling.max_tokens = {run.rollout.sampling.max_tokens}"
        raise ConfigError(f"{asked} and a prompt do not fit into {most}")
    return room


def _cached(run: Run, engine: TorchEngine, shape: DecoderConfig) -> int:
    """Returns how many tokens a prompt may have together with what follows, so that a group of it and of any
    shorter prompt fits into the torch engine's cache.

    A group's pages do not only grow with its prompt, since a prompt of whole pages shares one page more. But a
    page more of prompt is a page more of the group: the first prompt without room is looked for by its place
    in its last page."""
    pages, after = cached_pages(engine, shape), run.rollout.tokens_after_prompt
    lacking = (
        prompt + PAGE * max(0, pages + 1 - pages_of_group(prompt, _together(run), after))
        for prompt in range(1, PAGE + 1)
    )
    return min(lacking) - 1 + after


def check_experts(config: DecoderConfig, cfg: LearnerConfig) -> None:
    """Raises ConfigError for settings that need a mixture of experts if the model is none."""
    if config.sparse_layers:
        return
    for name in ("routing_replay", "router_aux_coef"):
        if getattr(cfg, name):
            raise ConfigError(f"learner.{name}: {config.family} has no experts")


def check_format(shape: DecoderConfig, format: str) -> None:
    """Raises ConfigError for a number format that some linear of the model does not allow. Otherwise this would
    become known only after the warm start."""
    try:
        for name, size in shape.tensors().items():
            if is_quantized(name):
                check_inputs(format, size[-1], name)
    except QuantizationError as error:
        raise ConfigError(f"rollout.format = {format!r}: {error}") from error


def check_engine(shape: DecoderConfig, run: Run, prompt: int) -> None:
    """Raises ConfigError for a number format in which the engine does not hold a model of this shape, a setting
    that it does not heed, and a cache without room for the responses to a prompt of `prompt` tokens."""
    rollout, engine = run.rollout, run.rollout.engine
    for name in HF_IGNORES if isinstance(engine, HfEngine) else ():
        if getattr(engine, name) != getattr(HfEngine(), name):
            raise ConfigError(f"rollout.engine.{name}: not heeded by rollout.engine.type = 'hf'")
    if isinstance(engine, TorchEngine) and engine.kv_cache_bytes:
        needed = pages_of_group(prompt, _together(run), rollout.tokens_after_prompt)
        if needed > cached_pages(engine, shape):
            raise ConfigError(
                f"rollout.engine.kv_cache_bytes = {engine.kv_cache_bytes} has no room for {_together(run)} "
                f"responses of {rollout.tokens_after_prompt} tokens to a prompt of {prompt}, which need "
                f"{needed * PAGE * position_bytes(engine, shape)}"
            )
    if not isinstance(engine, VllmEngine):
        return
    if problem := vllm_refuses(shape, rollout.format, engine.tensor_parallel):
        raise ConfigError(f"rollout.format = {rollout.format!r}: {problem}")


def _together(run: Run) -> int:
    """Returns how many responses to a prompt are asked for at once."""
    return run.learner.group_size if isinstance(run.rollout.environment, SingleTurn) else 1


def teacher_shape(path: str) -> DecoderConfig:
    """Returns the shape of the teacher in directory `path`. Raises CheckpointError if it cannot be read, as one
    that another program has quantized."""
    try:
        return check_frozen(path)
    except (CheckpointError, ConfigError) as error:
        other = "; one that a server can read teaches from there: learner.teacher.type = 'server'"
        there = (Path(path) / "config.json").exists()
        raise CheckpointError(f"learner.teacher.path: {error}{other * there}") from error


def check_teacher(path: str, tokenizer: Tokenizer) -> None:
    """Raises ConfigError unless the model in directory `path` reads the student's token ids, and what
    `teacher_shape` raises."""
    shape = teacher_shape(path)
    own, probe = load_tokenizer(path), PROBE
    if isinstance(tokenizer, CharTokenizer):
        probe = probe[:6]
    same = own.vocab_size == tokenizer.vocab_size and own.encode(probe) == tokenizer.encode(probe)
    if not same or shape.vocab_size < tokenizer.vocab_size:
        raise ConfigError(f"learner.teacher.path = {path!r}: its tokenizer is not the student's")


def check_reference(reference: DecoderConfig, policy: DecoderConfig, path: str) -> None:
    """Raises ConfigError unless the reference model in directory `path` has the policy's architecture."""
    one, other = (
        msgspec.structs.replace(
            config,
            bos_id=None,
            eos_ids=(),
            pad_id=None,
            stored=(),
            foreign=computing(config.foreign),
        )
        for config in (reference, policy)
    )
    # Files may have the tensors in another order.
    if one != other or dict(reference.stored) != dict(policy.stored):
        raise ConfigError(f"learner.reference_kl.path = {path!r}: not shaped like the policy")
