"""What a version costs: the learner's time, the engine's pause, and when its first token is drawn.

    python -m bench.weights.swap

The quickstart's model. "Alone" is a learner step on fixed groups; "inline" the same with the version made on
the learner's thread after it, as it was once; "beside" with the version before made meanwhile
(learner/publishing/weight_publisher.py): the three take turns, and medians count. The engine is kept full on
the same event loop. Prints a table, and writes it to runs/bench/swap.{md,json}.
"""

import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from statistics import median

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch

from areal_q.config import Run, load
from areal_q.tasks import build_task, build_tokenizer
from bench.common import ROOT, commit, device, publish, table
from bench.records import make_trajectory
from buffer.weight_sync import WeightServer, WeightSubscriber
from learner.backends.single_device import TorchPolicy
from learner.build_policy import build_model
from learner.data.packing import Sample
from learner.policy_update import update_policy
from learner.publishing.version_builder import VersionBuilder
from learner.publishing.weight_publisher import WeightPublisher
from rollout.engines import build_engine
from rollout.engines.base import Request

TURNS = 40
FOLLOWED = 50


def samples(run: Run, vocab: int) -> list[Sample]:
    """Returns as many responses as a step of the quickstart has, of its length."""
    rng = np.random.default_rng(0)

    def sample(index: int) -> Sample:
        ids, logprobs = rng.integers(0, vocab, 4), -3 * rng.random(4)
        trajectory = make_trajectory(index % run.learner.group_size, ids, logprobs)
        prompt = rng.integers(0, vocab, 6).astype(np.int32)
        group = index // run.learner.group_size
        return Sample(group, prompt, trajectory, float(rng.normal()), np.zeros(4, np.int64))

    return [sample(i) for i in range(run.learner.groups * run.learner.group_size)]


def learner_time(run: Run) -> dict[str, list[float]]:
    """Milliseconds of wall and CPU clock of a step, each way, by turns."""
    tokenizer = build_tokenizer(run.model, run.task)
    policy = TorchPolicy(build_model(run.model, tokenizer, run.seed), run.learner, 1.0)
    batch = samples(run, tokenizer.vocab_size)
    publisher = WeightPublisher(VersionBuilder(run), lambda _: None)
    policy.readers.append(publisher.wait_until_read)
    version = 0

    def alone() -> None:
        update_policy(policy, batch)

    def inline() -> None:
        update_policy(policy, batch)
        publisher.builder.build(policy.model, version)

    def beside() -> None:
        publisher.begin(policy.model, version, {})
        update_policy(policy, batch)
        publisher.wait_until_out()

    ways: dict[str, Callable[[], None]] = {"alone": alone, "inline": inline, "beside": beside}
    took: dict[str, list[float]] = {way: [] for way in ways}
    waits: list[float] = []
    for _turn in range(TURNS):
        for way, run_step in ways.items():
            version += 1
            began = time.perf_counter()
            run_step()
            took[way].append(1e3 * (time.perf_counter() - began))
            if way == "beside":
                waits.append(1e3 * publisher.waited_s)
    publisher.close()
    return {way: ms[3:] for way, ms in (took | {"waited": waits}).items()}


async def first_token(run: Run) -> dict[str, float]:
    """Times, with the quickstart's model and its engine full, from `publish` to the first token drawn with
    the new version, and the pause of generation at the swap."""
    task, tokenizer = build_task(run.task), build_tokenizer(run.model, run.task)
    model = build_model(run.model, tokenizer, run.seed)
    builder = VersionBuilder(run)
    engine = build_engine(run.rollout.engine)
    made_ms, first_ms, pauses_ms = [], [], []
    seen: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        weight_server = WeightServer(f"ipc://{directory}/a", f"ipc://{directory}/f")
        subscriber = WeightSubscriber(*weight_server.endpoints, run=run.name)
        await engine.start()
        request = Request(
            prompt_ids=np.array(tokenizer.encode_prompt(task.train[0].prompt), np.int32),
            num_samples=64,
            sampling=msgspec.structs.replace(run.rollout.sampling, max_tokens=200),
            seed=0,
            stop_ids=frozenset(),
        )

        def drawn(*_: object) -> None:
            seen.setdefault(engine.version, time.perf_counter())

        async def generate() -> None:
            while True:
                await engine.generate(request, drawn)

        drawing = [asyncio.create_task(generate()) for _ in range(4)]
        for version in range(FOLLOWED + 3):
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p), alpha=1e-4)
            began = time.perf_counter()
            weight_server.publish(builder.build(model, version))
            made_ms.append(1e3 * (time.perf_counter() - began))
            pauses_ms.append(1e3 * await engine.load_weights(await subscriber.wait()))
            while version not in seen:
                await asyncio.sleep(0.001)
            first_ms.append(1e3 * (seen[version] - began))
        for task_ in drawing:
            task_.cancel()
        await asyncio.gather(*drawing, return_exceptions=True)
        await engine.close()
        subscriber.close()
        weight_server.close()
    values = {"learner": made_ms, "first token": first_ms, "pause": pauses_ms}
    return {
        f"{name} p{q}": float(np.percentile(ms[3:], q))
        for name, ms in values.items()
        for q in (50, 99)
    }


def main() -> None:
    torch.set_num_threads(1)
    run = load(ROOT / "configs" / "quickstart.toml")
    steps, tokens = learner_time(run), asyncio.run(first_token(run))
    rows = [[way, *(f"{np.percentile(ms, q):.2f}" for q in (50, 99))] for way, ms in steps.items()]
    extra = {way: median(steps[way]) - median(steps["alone"]) for way in ("inline", "beside")}
    sections = [
        f"A version's cost · {device()} · commit {commit()}",
        "A learner step, ms (waited: for the version beside it):",
        table(["way", "p50", "p99"], rows),
        "More than alone, ms p50: " + ", ".join(f"{way} {ms:.2f}" for way, ms in extra.items()),
        "With a full engine, ms: " + ", ".join(f"{name} {ms:.2f}" for name, ms in tokens.items()),
    ]
    publish("swap", "\n\n".join(sections), {"steps": steps, "tokens": tokens})


if __name__ == "__main__":
    main()
