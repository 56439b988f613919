"""The export at the end of a run: the model in Hugging Face layout, with the parameters that other programs
expect."""

from contextlib import suppress
from pathlib import Path

import torch

from areal_q.config import Run
from areal_q.errors import BufferGone
from areal_q.models import Decoder
from areal_q.models.hf.adapters import save_adapted
from areal_q.tasks import Tokenizer, build_tokenizer
from learner.loop import Learner
from learner.replay.export import declared, source_of, write_plain

EXPORTED = ("hf", "base", "adapter")
"""Directories that `export_model` writes, the last two for adapters alone"""


def export_model(run: Run, model: Decoder, directory: Path, tokenizer: Tokenizer) -> None:
    """Writes `hf/`, and for adapters `base/` and `adapter/`, into the run's directory, in the dtype of the
    model that the run began with. UAQ's scaling is taken out of the weights of `model` itself."""
    if run.learner.lora:
        dtype, source = getattr(torch, declared(run.model)), source_of(run.model)
        save_adapted(model, directory, run.learner.lora, run.learner.uaq, tokenizer, dtype, source)
    else:
        write_plain(run, model, directory / "hf", tokenizer)


def finish(learner: Learner, directory: Path, step: int) -> bool:
    """Exports the model to the run's `directory`, as nothing reads the learner's own weights any more, and
    writes the `end` record with reason "done", or "drained" if `step` is not the last. Returns True if the run
    is done and Redis tells the workers so, which end then."""
    run = learner.run
    export_model(run, learner.policy.model, directory, build_tokenizer(run.model, run.task))
    accuracy, done = learner.heldout.accuracy, learner.over
    learner.metrics.write(
        "end",
        step,
        {} if accuracy is None else {"eval/accuracy": accuracy},
        reason="done" if done else "drained",
        model=str(directory / "hf"),
    )
    if done:
        with suppress(BufferGone):
            learner.buffer.finish()
            return True
    return False
