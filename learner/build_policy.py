"""Builds the policy that a learner begins with: from nothing, from a model's files, or from a checkpoint."""

import logging
import threading
from pathlib import Path

import torch

from areal_q.checks.machine import check_device
from areal_q.checks.model import check_reference
from areal_q.config import ModelConfig, Run, SmallModel
from areal_q.models import Decoder, init_weights, load_model
from areal_q.models.low_bit.bf16_rounding import dither
from areal_q.models.shape import config_at, shape_of
from areal_q.models.smoothed_state import packed
from areal_q.observability.metrics_log import MetricsLog
from areal_q.quant.rescaling import apply_uaq
from areal_q.quant.smoothing import SmoothingScales
from areal_q.tasks import Task, Tokenizer, problem_at
from learner import checkpoint
from learner.backends.precision import set_precision
from learner.backends.single_device import TorchPolicy
from learner.supervised.warm_start import warm_start

logger = logging.getLogger(__name__)


def build_model(cfg: ModelConfig, tokenizer: Tokenizer, seed: int) -> Decoder:
    """Returns the model before any training, in float32. The seed is that of a small model's weights."""
    if not isinstance(cfg, SmallModel):
        return load_model(cfg, cfg.path)
    model = Decoder(shape_of(cfg, tokenizer))
    init_weights(model, seed)
    return model


def build_policy(
    run: Run,
    directory: Path,
    resume: bool,
    task: Task,
    tokenizer: Tokenizer,
    metrics: MetricsLog,
    stop: threading.Event,
) -> tuple[TorchPolicy, checkpoint.State | None]:
    """Returns the policy after its warm start and None, or with `resume` the policy and the state of the newest
    checkpoint. Raises ConfigError for settings that do not fit the model, CheckpointError for a damaged
    checkpoint, and Stopped if `stop` ends the warm start."""
    check_device("learner.device", run.learner.device)
    torch.manual_seed(run.seed)
    model = build_model(run.model, tokenizer, run.seed).to(run.learner.device)
    if resume:
        policy = checkpoint.policy_of(model, run)
        state = checkpoint.restore(directory / "checkpoints", policy)
        if policy.sticky and not policy.sticky.tensors():
            logger.warning(
                "checkpoint of step %d: holds no ranges of sticky scales, so that they begin anew, and what "
                "is published now differs from what was before",
                state.step,
            )
        return policy, state
    reference = run.learner.reference_kl and run.learner.reference_kl.path
    if reference:
        check_reference(config_at(run.model, reference), model.config, reference)
    _warm_start(model, run, task, tokenizer, metrics, stop)
    prepare_for_rounding(model, run)
    policy = checkpoint.policy_of(model, run)
    if policy.smoothing:
        begin_smoothing(policy, policy.smoothing, run, task, tokenizer)
    if reference:
        policy.reference = build_reference(reference, run.model, model)
        set_precision(policy.reference, run)
        policy.fold()
    return policy, None


def prepare_for_rounding(model: Decoder, run: Run) -> None:
    """Dithers the weights of a pretrained model that were stored in bfloat16, as which at least the export, and
    for most settings what is published, rounds them again, and applies UAQ, both before the first step."""
    pretrained = not isinstance(run.model, SmallModel) and not run.learner.lora
    if pretrained and dither(model, run.seed):
        logger.info("what was stored in bfloat16 is dithered: docs/aligned.md")
    # Later, since a bfloat16 number over 1.5 is none, but lies at thirds between two.
    if run.learner.uaq > 1:
        apply_uaq(model, run.learner.uaq)


def begin_smoothing(
    policy: TorchPolicy, scales: SmoothingScales, run: Run, task: Task, tokenizer: Tokenizer
) -> None:
    """Gives `policy` its `scales`, and chooses them for the first version on prompts of the first problems."""
    policy.smoothing = scales
    first = (problem_at(task, n, run.seed).asked for n in range(len(task.train)))
    prompts = map(tokenizer.encode_prompt, first)
    policy.smooth(*packed(prompts, scales.cfg.tokens, run.learner.device))


def build_reference(path: str, kind: ModelConfig, policy: Decoder) -> Decoder:
    """Returns the frozen model in directory `path`, read as the policy, of this `kind`, was, and in the dtype
    of its passes, as after a resumption. Raises ConfigError if its shape is not the policy's."""
    reference = load_model(kind, path)
    check_reference(reference.config, policy.config, path)
    reference.dtype = policy.dtype
    return reference.to(next(policy.parameters()).device).requires_grad_(False)


def _warm_start(
    model: Decoder,
    run: Run,
    task: Task,
    tokenizer: Tokenizer,
    metrics: MetricsLog,
    stop: threading.Event,
) -> None:
    steps = run.warmstart.steps

    def progress(step: int, loss: float) -> None:
        values = {"warmstart/loss": loss, "warmstart/step": step, "warmstart/steps": steps}
        metrics.write("warmstart", 0, values)

    if cached := warm_start(model, run, task, tokenizer, progress, stop):
        values = {"warmstart/step": steps, "warmstart/steps": steps}
        metrics.write("warmstart", 0, values, cache=str(cached))
