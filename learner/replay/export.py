"""`areal-q export RUN DIR` writes a checkpoint's policy in Hugging Face layout, also while RUN is in progress.

Exit codes: 0 written; 2 no such run or checkpoint, a damaged one, or DIR exists already.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from areal_q.config import ModelConfig, PretrainedModel, Run
from areal_q.errors import CheckpointError, ConfigError
from areal_q.observability.metrics_log import read_metrics
from areal_q.observability.run_end import best_checkpoint
from areal_q.system.command import RunDirectory
from areal_q.system.run_dir import METRICS_FILE, checkpoints_of, recorded_settings
from areal_q.tasks import Tokenizer

if TYPE_CHECKING:
    from areal_q.models import Decoder

ExportDtype = Literal["float32", "bfloat16", "float16"]


def main(
    directory: RunDirectory,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="a directory that is made")],
    step: Annotated[
        int | None, typer.Option(min=0, help="of this checkpoint; default: the newest")
    ] = None,
    best: Annotated[
        bool,
        typer.Option("--best", help="of the best checkpoint, by eval.best or else eval/accuracy"),
    ] = False,
    dtype: Annotated[
        ExportDtype | None,
        typer.Option(
            help="of the weights; default: as config.json of the run's model.path says, else float32"
        ),
    ] = None,
) -> None:
    """Writes what a run had learnt by a checkpoint as a model directory that transformers and vLLM load."""
    if target.exists():
        raise ConfigError(f"{target}: is there already")
    if best and step is not None:
        raise ConfigError("--best and --step: only one of them")
    step = best_step(directory) if best else step
    # torch takes seconds to import; by now a wrong option has been refused.
    found, dtype = export(directory, target, step, dtype)
    typer.echo(f"{target}: {found.name}, {dtype}")


def best_step(directory: Path) -> int:
    """Returns the step of the best of the checkpoints that are there, by the metric `eval.best`, without one by
    the held-out accuracy. Raises LogError if there is no run, CheckpointError if none was evaluated."""
    run = recorded_settings(directory)
    if found := best_checkpoint(run, directory, read_metrics(directory / METRICS_FILE)):
        return found[0]
    metric = run.eval.best or "eval/accuracy"
    raise CheckpointError(f"{directory}: no checkpoint has {metric}; eval.best keeps one that has")


def export(
    directory: Path, target: Path, step: int | None = None, dtype: ExportDtype | None = None
) -> tuple[Path, ExportDtype]:
    """Writes the checkpoint of `step`, by default the newest, to `target`, as at the end of a run but in
    `dtype`. Returns the checkpoint's path and the dtype.

    Raises CheckpointError if the checkpoint is missing, damaged or does not fit into the dtype, LogError if
    there is no run, ConfigError if the run trains adapters.
    """
    from areal_q.models import DecoderConfig
    from areal_q.models.hf.checkpoint import meta_decoder
    from learner import checkpoint
    from learner.supervised.demonstrations import tokenizer_of

    run = recorded_settings(directory)
    if run.learner.lora:
        raise ConfigError(
            f"{directory}: adapters (learner.lora) are exported at the end of the run only"
        )
    found = checkpoints_of(directory)
    chosen = max(found, default=None) if step is None else step
    if chosen not in found:
        kept = ", ".join(map(str, found)) or "none"
        raise CheckpointError(f"{directory}: no checkpoint of step {chosen}; there are: {kept}")
    state = checkpoint.read_state(found[chosen])
    tensors = checkpoint.read_tensors(found[chosen], state)
    model = meta_decoder(DecoderConfig.from_hf(state.model))
    weights = {k.removeprefix("model."): v for k, v in tensors.items() if k.startswith("model.")}
    model.load_state_dict(weights, assign=True)
    dtype = dtype or declared(run.model)
    write_plain(run, model, target, tokenizer_of(run), dtype)
    return found[chosen], dtype


def write_plain(
    run: Run, model: "Decoder", target: Path, tokenizer: Tokenizer, dtype: ExportDtype | None = None
) -> None:
    """Writes `model`, which has no adapters, to `target`, by default in the dtype of the one that the run began
    with. UAQ's scaling is taken out of the weights of `model` itself. Raises CheckpointError for a value that
    does not fit into the dtype."""
    import torch

    from areal_q.models import save_decoder
    from areal_q.quant.rescaling import fold_back

    if run.learner.uaq > 1:
        fold_back(model, run.learner.uaq)
    kind = getattr(torch, dtype or declared(run.model))
    save_decoder(model, target, tokenizer, kind, source_of(run.model))


def source_of(model: ModelConfig) -> str | None:
    """Returns the directory of the model that the run began with; None for one that was made from nothing."""
    return model.path if isinstance(model, PretrainedModel) else None


def declared(model: ModelConfig) -> ExportDtype:
    """Returns the dtype of the model that the run began with, or float32 if that cannot be read."""
    from areal_q.models import declared_dtype

    path = source_of(model)
    found = declared_dtype(path) if path else None
    return next((dtype for dtype in get_args(ExportDtype) if dtype == found), "float32")
