"""The warm start: supervised steps before RL, after which some responses earn a reward.

The resulting weights are cached in

    ~/.cache/areal-q/warmstart/<hash of everything that they depend on>/model.safetensors
"""

import hashlib
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
from msgspec.structs import replace
from safetensors import SafetensorError
from safetensors.torch import load_file

from areal_q.config import AdamW, PretrainedModel, Run, TorchBackend
from areal_q.errors import Stopped
from areal_q.models import Decoder
from areal_q.system.files import replacing_among_others, save_tensors
from areal_q.tasks import Task, Tokenizer, problem_at
from learner.backends.single_device import TorchPolicy
from learner.policy_update import SingleProcessUpdater
from learner.supervised.demonstrations import Demonstrations
from learner.supervised.supervised_step import learn, share_right, supervised_learner

logger = logging.getLogger(__name__)
Progress = Callable[[int, float], None]
"""A function that is called with (step, loss in nats per token)."""
REVISION = 4
"""A part of the cache's key, to be increased when a change of the program makes the same settings give other
weights."""
WARMUP_STEPS = 19
"""Steps before the first with the full learning rate."""
PROGRESS_STEPS = 10
"""Steps from one call of the progress function to the next."""
LOOK_EVERY, MEAN_LOOKS = 2, 4
"""Steps from one look at the accuracy to the next, and looks of its running mean."""


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
        with replacing_among_others(path) as part:  # several runs may fill one cache at a time
            save_tensors({k: v.cpu().contiguous() for k, v in model.state_dict().items()}, part)
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
    # Its weights are cached by `_key`, whatever precision or adapters RL goes on with.
    learner = replace(
        supervised_learner(run.learner),
        optimizer=AdamW(lr=cfg.lr, warmup_steps=WARMUP_STEPS),
        max_grad_norm=1.0,
        dtype="float32",
        precision="full",
        lora=None,
        backend=TorchBackend(),
        microbatch_tokens=run.learner.pass_tokens,  # this process computes alone what several share
    )
    data = Demonstrations(task, tokenizer, longest=0, seed=run.seed)
    policy = TorchPolicy(model, learner, temperature=1.0)
    updater = SingleProcessUpdater(policy)
    accuracy, nats = 0.0, 0.0
    for step in range(cfg.steps):
        if stop.is_set():
            raise Stopped("during the warm start")
        samples = [data.at(number) for number in range(step * cfg.batch, (step + 1) * cfg.batch)]
        if cfg.until_accuracy < 1 and step % LOOK_EVERY == 0:
            accuracy += (share_right(policy, samples) - accuracy) / MEAN_LOOKS
        nats = learn(updater, samples)["train/loss"]
        if step % PROGRESS_STEPS == 0:
            progress(step, nats)
        if accuracy >= cfg.until_accuracy:
            break
    progress(cfg.steps, nats)


def _key(run: Run, task: Task) -> str:
    """Returns a hash of the settings, of some problems, since a file of problems may change, and of when the
    model's files were written, as a model may be."""
    some = range(min(len(task.train), 4096))
    parts = [REVISION, run.model, run.task, run.warmstart, run.seed, len(task.train)]
    parts += [problem_at(task, number, run.seed) for number in some]
    parts.append(run.learner.router_aux_coef)
    if isinstance(run.model, PretrainedModel):
        files = sorted(Path(run.model.path).glob("*.safetensors"))
        parts += [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.blake2b(msgspec.msgpack.encode(parts), digest_size=12).hexdigest()
