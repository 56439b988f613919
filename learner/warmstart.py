"""The supervised phase before RL: enough skill that some responses earn a reward. Cached by content.

~/.cache/areal-q/warmstart/<hash of everything that it depends on>/model.safetensors
"""

import hashlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from areal_q.config import Run
from areal_q.models import Decoder, PackedLayout
from areal_q.tasks import Task, Tokenizer, problem_at

logger = logging.getLogger(__name__)
Progress = Callable[[int, float], None]
"""(step, loss)"""


def warm_start(
    model: Decoder, run: Run, task: Task, tokenizer: Tokenizer, progress: Progress
) -> bool:
    """Trains `model` in place on correct answers, or loads the cached result. True if it was cached."""
    if run.warmstart.steps == 0:
        return False
    path = _cache_dir() / "warmstart" / _key(run, task) / "model.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
        logger.info("warm start taken from %s", path.parent)
        return True
    _train(model, run, task, tokenizer, progress)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{os.getpid()}.tmp")
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, part)
    part.rename(path)
    return False


def _train(model: Decoder, run: Run, task: Task, tokenizer: Tokenizer, progress: Progress) -> None:
    cfg = run.warmstart
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), fused=True)
    for step in range(cfg.steps):
        numbers = range(step * cfg.batch, (step + 1) * cfg.batch)
        rows = []
        for number in numbers:
            problem = problem_at(task, number, run.seed)
            prompt = tokenizer.encode_prompt(problem.prompt)
            rows.append((prompt, [*tokenizer.encode(problem.answer), tokenizer.eos_id]))
        loss = supervised_loss(model, rows)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        decay = 1.0 - step / cfg.steps
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * min(decay, (step + 1) / 20)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 10 == 0 or step == cfg.steps - 1:
            progress(step + 1, loss.item())


def supervised_loss(model: Decoder, rows: list[tuple[list[int], list[int]]]) -> torch.Tensor:
    """Mean cross-entropy, in nats, of the response tokens of (prompt, response) rows."""
    layout = PackedLayout.of([len(p) + len(r) for p, r in rows])
    ids = torch.tensor([t for p, r in rows for t in (*p, *r)])
    starts = torch.tensor([0, *(len(p) + len(r) for p, r in rows)]).cumsum(0)
    predict = torch.cat(
        [torch.arange(len(r)) + starts[i] + len(p) - 1 for i, (p, r) in enumerate(rows)]
    )
    hidden = model(ids, layout)
    return nn.functional.cross_entropy(model.logits(hidden[predict]), ids[predict + 1])


def _key(run: Run, task: Task) -> str:
    """Hash of the settings, and of a sample of the problems themselves: a file may change under its path."""
    parts = [run.model, run.task, run.warmstart, run.seed, len(task.train)]
    problems = [problem_at(task, n, run.seed) for n in range(min(len(task.train), 4096))]
    return hashlib.blake2b(msgspec.msgpack.encode([1, parts, problems]), digest_size=12).hexdigest()


def _cache_dir() -> Path:
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "areal-q"
