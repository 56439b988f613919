"""The warm start: supervised steps before RL, after which some responses earn a reward.

The resulting weights are cached in

    ~/.cache/areal-q/warmstart/<hash of everything that they depend on>/model.safetensors
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from itertools import accumulate, count
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from areal_q.config import Run
from areal_q.errors import Stopped
from areal_q.models import Decoder, PackedLayout
from areal_q.system.files import move_into_place, save_tensors
from areal_q.tasks import Task, Tokenizer, problem_at

logger = logging.getLogger(__name__)
Progress = Callable[[int, float], None]
"""A function that is called with (step, loss in nats per token)."""
REVISION = 2
"""A part of the cache's key, to be increased when a change of the program makes the same settings give other
weights."""
WARMUP_STEPS = 20
"""Steps over which the learning rate rises to its full value."""
PROGRESS_STEPS = 10
"""Steps from one call of the progress function to the next."""
MEAN_STEPS = 8
"""Steps of the running mean of the accuracy."""


def warm_start(
    model: Decoder,
    run: Run,
    task: Task,
    tokenizer: Tokenizer,
    progress: Progress,
    stop: threading.Event,
) -> Path | None:
    """Trains `model` in place on correct answers, or loads the cached result. Returns the cache's directory if
    the weights came from there, else None. Raises Stopped if `stop` is set meanwhile."""
    if run.warmstart.steps == 0:
        return None
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    path = cache / "areal-q" / "warmstart" / _key(run, task) / "model.safetensors"
    if _cached(path, model):
        logger.info("warm start taken from %s", path.parent)
        return path.parent
    _train(model, run, task, tokenizer, progress, stop)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_name(f".{os.getpid()}.tmp")  # several runs may fill one cache at a time
        save_tensors({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, part)
        move_into_place(part, path)
    except (OSError, SafetensorError) as error:  # without a home or room, the next run trains again
        logger.warning("the warm start cannot be cached for the next run: %s: %s", path, error)
    return None


def _cached(path: Path, model: Decoder) -> bool:
    """Loads `path` into `model`. Returns False if there is no such file or it cannot be read."""
    try:
        model.load_state_dict(load_file(path))
    except FileNotFoundError:
        return False
    except (OSError, SafetensorError) as error:
        logger.warning("%s: %s; it is made again", path, error)
        return False
    return True


def _train(
    model: Decoder,
    run: Run,
    task: Task,
    tokenizer: Tokenizer,
    progress: Progress,
    stop: threading.Event,
) -> None:
    cfg = run.warmstart
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), fused=True)
    numbers = count()
    accuracy, nats = 0.0, 0.0
    for step in range(cfg.steps):
        if stop.is_set():
            raise Stopped("during the warm start")
        rows = []
        for _ in range(cfg.batch):
            problem = problem_at(task, next(numbers), run.seed)
            answer = [*tokenizer.encode(problem.answer), tokenizer.eos_id]
            rows.append((tokenizer.encode_prompt(problem.asked), answer))
        loss, right = supervised_loss(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        accuracy += (right - accuracy) / MEAN_STEPS
        nats = loss.item()
        if step % PROGRESS_STEPS == 0:
            progress(step, nats)
        if accuracy >= cfg.until_accuracy:
            break
    progress(cfg.steps, nats)


def supervised_loss(
    model: Decoder, rows: list[tuple[list[int], list[int]]]
) -> tuple[torch.Tensor, float]:
    """Returns the mean cross-entropy, in nats, of the response tokens in `rows` of (prompt, response), and the
    share of rows that greedy decoding gets right, as each of their tokens is the most probable."""
    device = next(model.parameters()).device
    layout = PackedLayout.of([len(p) + len(r) for p, r in rows], device)
    ids = torch.tensor([t for p, r in rows for t in (*p, *r)]).to(device, non_blocking=True)
    starts = [0, *accumulate(layout.lengths)]
    predict = torch.cat(
        [
            torch.arange(start + len(p) - 1, start + len(p) + len(r) - 1)
            for start, (p, r) in zip(starts, rows, strict=False)
        ]
    )
    predict = predict.to(device, non_blocking=True)
    logits = model.logits(model(ids, layout)[predict])
    hits = (logits.argmax(-1) == ids[predict + 1]).cpu().split([len(r) for _, r in rows])
    right = sum(bool(hit.all()) for hit in hits) / len(rows)
    return nn.functional.cross_entropy(logits, ids[predict + 1]), right


def _key(run: Run, task: Task) -> str:
    """Returns a hash of the settings and of some problems, since a file of problems may change."""
    some = range(min(len(task.train), 4096))
    parts = [REVISION, run.model, run.task, run.warmstart, run.seed, len(task.train)]
    parts += [problem_at(task, number, run.seed) for number in some]
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=12).hexdigest()
