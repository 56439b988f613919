"""What a reward that fails for a share of the correct answers does to learning, dropped and counted as 0.

    python -m bench.reward_failures --seeds 0 1 2

The quickstart's task in one process (bench/stability/lab.py), every arm of a seed from the same warm start.
The reward is 1 for the answer, NEAR for what differs from it in one digit, else 0. It never fails; or it fails
for SHARE of the correct answers, chosen at random, with `reward.on_error = "drop"`; or the same with "zero".
Accuracy is greedy, on held-out problems, judged by the task's own reward. Each arm's result is kept in
runs/bench/reward_failures; one that is there is not run again.
"""

import argparse
import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from areal_q.config import Run, load
from areal_q.tasks import Completed, Problem, Reward, Score, build_reward
from bench.common import RESULTS, ROOT, commit, device, say
from bench.stability.lab import train

SHARE = 0.3
NEAR = 0.8
"""Above 1 - SHARE: counted as 0, failures make an answer that is nearly right worth more than the right one"""
ARMS = ("no failures", "drop", "zero")
SETTING = [
    "warmstart.until_accuracy=0.45",
    "learner.groups=16",
    "learner.max_lag=0",
    "learner.optimizer.decay_steps=0",
    "eval.problems=256",
]


@dataclass
class NearReward:
    """The run's own reward, but with credit for what is nearly right; where `on_error` is set it fails for
    SHARE of the correct answers."""

    reward: Reward
    on_error: str | None
    random: random.Random
    failure = ""

    async def start(self) -> None:
        await self.reward.start()

    async def __call__(self, problem: Problem, responses: Sequence[Completed]) -> list[Score]:
        scores = await self.reward(problem, responses)
        pairs = zip(responses, scores, strict=True)
        return [self._near(problem, response.text, score) for response, score in pairs]

    def _near(self, problem: Problem, response: str, score: Score) -> Score:
        if not score.correct:
            return Score(NEAR if nearly(problem.answer, response) else 0.0, False)
        if self.on_error is None or self.random.random() >= SHARE:
            return score
        failed = Score.failed("exception")
        return Score.zero("exception", "exception") if self.on_error == "zero" else failed

    async def close(self) -> None:
        await self.reward.close()


def nearly(answer: str, response: str) -> bool:
    """Tells if exactly one character differs."""
    return len(answer) == len(response) and sum(map(str.__ne__, answer, response)) == 1


def settings(seed: int, *overrides: str) -> Run:
    every = [*SETTING, f"seed={seed}", *overrides]
    return load(ROOT / "configs" / "quickstart.toml", every)


async def accuracies(arm: str, run: Run) -> dict[int, float]:
    """Held-out accuracy by step."""
    on_error = None if arm == "no failures" else arm
    reward = NearReward(build_reward(run), on_error, random.Random(run.seed))
    step, found = 0, {}
    async for values in train(run, reward):
        step += 1
        if "eval/accuracy" in values:
            found[step] = values["eval/accuracy"]
    return found


def result(arm: str, seed: int, *overrides: str) -> dict[int, float]:
    """Trains and keeps the result, or reads one that is there."""
    name = "_".join([arm.replace(" ", "-"), str(seed), *overrides]).replace("/", "-")
    path = RESULTS / "reward_failures" / f"{name}.json"
    if not path.exists():
        say(f"{arm}, seed {seed}")
        found = asyncio.run(accuracies(arm, settings(seed, *overrides)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"commit": commit(), "device": device(), "accuracy": found}))
    return {int(k): v for k, v in json.loads(path.read_text())["accuracy"].items()}


def table(found: dict[str, list[dict[int, float]]]) -> str:
    """Mean over the seeds, and in brackets the least and the largest."""
    steps = list(next(iter(found.values()))[0])
    lines = ["| reward | " + " | ".join(f"step {s}" for s in steps) + " |"]
    lines.append("|---" * (len(steps) + 1) + "|")
    for arm in found:
        columns = [[one[s] for one in found[arm]] for s in steps]
        cells = [f"{mean(c):.3f} ({min(c):.3f}–{max(c):.3f})" for c in columns]
        lines.append(f"| {arm} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    parser.add_argument("overrides", nargs="*", default=["steps=60", "eval.every=15"])
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    found = {arm: [result(arm, seed, *args.overrides) for seed in args.seeds] for arm in args.arms}
    print(f"{device()}, commit {commit()}\n\n{table(found)}")


if __name__ == "__main__":
    main()
