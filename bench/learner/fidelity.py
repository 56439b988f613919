"""What the fidelity meter costs: its CPU time beside the learner's step, on the quickstart's shapes.

    python -m bench.learner.fidelity

Each round draws a step's groups with the torch engine, learns from them, publishes, and measures with each
share in turn. The model is untrained, so responses are as long as they may be.
"""

import asyncio
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from areal_q.config import Run, load
from areal_q.messages import Group, Ticket
from areal_q.tasks import build_task, build_tokenizer
from bench.common import ROOT, commit, device, publish, say, table
from bench.records import drawn_trajectory, make_group
from bench.stability.lab import Tickets
from buffer.sampling.replay_pool import SampledGroups
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_model
from learner.data.admission import Admission
from learner.data.staleness import VersionHistory
from learner.measure.fidelity import FidelityMeter
from learner.policy_update import SingleProcessUpdater
from learner.publishing.version_builder import VersionBuilder
from learner.train_step import train_step
from rollout.engines import build_engine
from rollout.engines.base import Engine, Request

QUICKSTART = ROOT / "configs" / "quickstart.toml"
ROUNDS = 16  # of which the default share measures one
SHARES = (0.015625, 1.0)


async def group(engine: Engine, ticket: Ticket) -> Group:
    done = await engine.generate(
        Request(
            prompt_ids=ticket.prompt_ids.numpy(),
            num_samples=ticket.group_size,
            sampling=ticket.sampling,
            seed=ticket.seed,
            stop_ids=frozenset({1}),
        )
    )
    trajectories = [drawn_trajectory(i, c, reward=float(i % 2)) for i, c in enumerate(done)]
    return make_group(ticket, engine=engine.name, trajectories=trajectories)


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    done = work()
    return time.process_time() - began, done


async def measure(run: Run) -> dict[str, list[float]]:
    """CPU seconds of the step, the publishing and the meters, and the mean gap, for each round."""
    tokenizer = build_tokenizer(run.model, run.task)
    policy = TorchPolicy(build_model(run.model, tokenizer, run.seed), run.learner, 1.0)
    builder, history, tickets = (
        VersionBuilder(run),
        VersionHistory(3),
        Tickets(),
    )
    task = build_task(run.task)
    admission: Any = Admission(run, task, tokenizer, tickets, 0, set())  # type: ignore
    shares = [load(QUICKSTART, [f"learner.fidelity.share={share}"]) for share in SHARES]
    meters = [FidelityMeter(each.learner, each.rollout.format) for each in shares]
    engine = build_engine(run.rollout.engine)
    await engine.start()
    found: dict[str, list[float]] = {"step": [], "gap": [], **{f"meter {s}": [] for s in SHARES}}
    for step in range(ROUNDS):
        version = builder.build(policy.model, step)
        history.add(step, version.manifest.digest)
        for meter in meters:
            meter.remember(version)
        await engine.load_weights(version)
        admission.issue(range(step * run.learner.groups, (step + 1) * run.learner.groups), step)
        issued = tickets.next(run.learner.groups)
        groups = await asyncio.gather(*(group(engine, ticket) for ticket in issued))
        updater = SingleProcessUpdater(policy)
        step_s, _ = timed(partial(train_step, updater, SampledGroups(groups), history, step))
        found["step"].append(step_s)
        for share, meter in zip(SHARES, meters, strict=True):
            seconds, values = timed(lambda: meter.measure(groups))  # noqa: B023
            found[f"meter {share}"].append(seconds)
            found["gap"] += [n for k, n in values.items() if k == "fidelity/gap_mean_nats"]
        say(f"round {step}: {found['step'][-1]:.2f} s, gap {found['gap'][-1]:.1e}")
    await engine.close()
    return found


def main() -> None:
    torch.set_num_threads(1)
    found = asyncio.run(measure(load(QUICKSTART)))
    step = statistics.median(found["step"])
    rows = [["learner step", f"{step * 1e3:.0f}", "1"]]
    for share in SHARES:
        cost = statistics.mean(found[f"meter {share}"])
        rows.append([f"meter, share {share}", f"{cost * 1e3:.1f}", f"{cost / step:.3f}"])
    text = f"{device()}, commit {commit()}, {ROUNDS} rounds; mean gap {max(found['gap']):.1e} nats at most\n\n"
    publish("fidelity", text + table(["", "CPU ms", "of the step"], rows), found)


if __name__ == "__main__":
    main()
