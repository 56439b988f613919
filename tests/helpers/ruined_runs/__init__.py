"""A small run that learns, and the same one ruined in five ways: settings, recorded metrics and verdicts.

The metrics beside this file are those of real runs in one process (bench/stability/lab.py). To record them
again: `PYTHONPATH=. python tests/helpers/ruined_runs/__init__.py`.
"""

import asyncio
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_q.config import Run, load
from areal_q.observability.learning_faults import FaultName
from areal_q.observability.metrics_log import Record

DATA = Path(__file__).parent
SMALL = [
    "model.layers=2", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.mlp=64",
    "model.max_positions=32", "task.digits=1", "task.heldout=20", "steps=60", "learner.groups=8",
    "learner.group_size=8", "learner.optimizer.lr=1e-3", "learner.optimizer.decay_steps=0",
    "eval.every=1", "eval.problems=20", "rollout.sampling.max_tokens=4",
]  # fmt: skip
WARM = ["warmstart.steps=400", "warmstart.until_accuracy=0.4"]
REWARDS = {
    "wrong reward": "return float(response.strip() == str(int(answer[::-1]) + 1)[::-1])",
    "constant reward": "return 1.0",
}
"""The bodies of rewards in users' files; the wrong one wants the sum plus one."""
RUINED: dict[str, list[str]] = {
    "healthy": [],
    "learning rate × 100": ["learner.optimizer.lr=1e-1"],
    "max_tokens 1": ["rollout.sampling.max_tokens=1"],
    "wrong reward": [],
    "constant reward": [],
    "wrong template": ["task.prompt={a} {b}=", "steps=10"],
}
"""The settings of each run that are not SMALL's. In the last the trained model is asked in another form than it
was taught, which it would learn in the end."""
EXPECTED: dict[str, list[FaultName]] = {
    "healthy": [],
    "learning rate × 100": ["policy diverged", "responses cut off", "reward is flat"],
    "max_tokens 1": ["responses cut off"],
    "wrong reward": ["reward contradicts"],
    "constant reward": ["reward contradicts", "reward is flat"],
    "wrong template": ["reward is flat"],
}
KEYS = {
    "step": (
        "reward/mean", "reward/std", "reward/uniform_share", "reward/right", "reward/right_refused",
        "reward/wrong", "reward/wrong_accepted", "response/tokens_mean", "response/cut_off_share",
        "policy/kl", "policy/ratio_max", "train/grad_norm",
    ),
    "eval": ("eval/accuracy",),
}  # fmt: skip
"""What is kept of the records"""


def settings_of(name: str, directory: Path = Path("ruined")) -> Run:
    """Returns the settings of the run `name`, whose files are in `directory`."""
    settings = [*SMALL, *RUINED[name]]
    if name == "wrong template":
        return load("quickstart", [*settings, "model.type=pretrained", f'model.path="{directory}"'])
    if name in REWARDS:
        settings.append(f'reward.path="{directory / "reward.py"}"')
    return load("quickstart", [*settings, *WARM])


def recorded(name: str) -> list[Record]:
    return [json.loads(line) for line in _file(name).read_text("utf-8").splitlines()]


async def run(name: str, directory: Path) -> list[Record]:
    """Returns what the run `name` records, really run; its files are written to `directory`."""
    from areal_q.models import save_decoder
    from areal_q.tasks import build_task, build_tokenizer
    from bench.stability.lab import train, warm_model

    if name in REWARDS:
        body = f"def reward(prompt, response, answer):\n    {REWARDS[name]}\n"
        (directory / "reward.py").write_text(body)
    if name == "wrong template":
        # The learner scales what it is given for UAQ; this model is to be as it was trained.
        trained = load("quickstart", [*SMALL, *WARM, "learner.uaq=1"])
        task, tokenizer = build_task(trained.task), build_tokenizer(trained.model, trained.task)
        save_decoder(warm_model(trained, task, tokenizer), directory, tokenizer)
    steps = [values async for values in train(settings_of(name, directory))]
    return list(_records(steps))


def _records(steps: list[dict[str, Any]]) -> Iterator[Record]:
    for step, values in enumerate(steps, start=1):
        for kind, keys in KEYS.items():
            kept = {key: float(f"{values[key]:.4g}") for key in keys if key in values}
            problems = {"eval/problems": 20.0} if kind == "eval" else {}
            yield {"kind": kind, "step": step, **kept, **problems}


def _file(name: str) -> Path:
    return DATA / f"{name.replace(' ', '-').replace('×', 'x')}.jsonl"


if __name__ == "__main__":
    for name in RUINED:
        with tempfile.TemporaryDirectory() as directory:
            records = asyncio.run(run(name, Path(directory)))
        _file(name).write_text("".join(f"{json.dumps(r)}\n" for r in records), "utf-8")
