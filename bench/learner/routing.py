"""What routing replay (R3) takes off the gap between quantized rollouts and the learner.

    python -m bench.learner.routing RUN          RUN: the directory of a finished run of a mixture of experts

The run's model is published in each format, the torch engine draws responses to the run's own prompts with it,
and the learner's full-precision model scores the same tokens twice: with its own routes, and with the recorded
ones. Nothing is stale, so what is left is quantization.
"""

import asyncio
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer

from areal_q.config import Run, load
from areal_q.models import Decoder, load_decoder
from areal_q.quant import FORMATS
from areal_q.tasks import build_task, build_tokenizer
from areal_q.weights.version import WeightVersion
from bench.common import commit, device, number, publish, say, table
from bench.records import drawn_trajectory
from bench.weights.packed import packed
from learner.backends.routing_replay import routed, routing_for
from learner.backends.single_device import logprobs_of
from learner.data.packing import PackedBatch, Sample
from learner.data.packing import pack_samples as pack_samples
from rollout.engines import build_engine
from rollout.engines.base import Completion, Request

HEADER = [
    "format",
    "routes elsewhere",
    "KL",
    "KL, R3",
    "ratio",
    "largest w",
    "largest w, R3",
    "ESS",
    "ESS, R3",
]


def main(
    directory: Annotated[Path, typer.Argument(metavar="RUN", help="a finished run's directory")],
    prompts: Annotated[int, typer.Option()] = 256,
    samples: Annotated[int, typer.Option(help="responses to each prompt")] = 8,
) -> None:
    torch.set_num_threads(1)
    run = load(directory / "config.toml")
    model = load_decoder(directory / "hf")
    found, tokens = {}, 0
    for format in FORMATS:
        say(format)
        batch = drawn(run, model, format, prompts, samples)
        tokens = max(tokens, int(batch.mask.sum()))
        found[format] = {
            "own": compared(run, model, batch, False),
            "R3": compared(run, model, batch, True),
        }
    rows = [line(format, values["own"], values["R3"]) for format, values in found.items()]
    head = f"{device()}; commit {commit()}; {directory.name}, up to {tokens:,} tokens in each format, lag 0."
    publish("routing", f"{head}\n\n{table(HEADER, rows)}", found)


def line(format: str, own: dict[str, float], replayed: dict[str, float]) -> list[str]:
    pairs = [number(values[key]) for key in ("weight_max", "ess") for values in (own, replayed)]
    ratio = number(own["kl"] / replayed["kl"])
    return [
        format,
        f"{own['disagreement']:.2%}",
        f"{own['kl']:.2e}",
        f"{replayed['kl']:.2e}",
        ratio,
        *pairs,
    ]


def drawn(run: Run, model: Decoder, format: str, prompts: int, samples: int) -> PackedBatch:
    """Responses of the engine on the weights of `model` in `format`."""
    tokenizer, task = build_tokenizer(run.model, run.task), build_task(run.task)
    requests = [
        Request(
            prompt_ids=np.array(tokenizer.encode_prompt(task.train[i].prompt), np.int32),
            num_samples=samples,
            sampling=run.rollout.sampling,
            seed=i * samples,
            stop_ids=frozenset(tokenizer.stops),
        )
        for i in range(prompts)
    ]
    responses = asyncio.run(_generate(run, published(model, format), requests))
    return pack_samples(
        [
            Sample(
                i,
                request.prompt_ids,
                drawn_trajectory(k, c),
                0.0,
                np.zeros(len(c.response_ids), np.int64),
            )
            for i, (request, group) in enumerate(zip(requests, responses, strict=True))
            for k, c in enumerate(group)
        ]
    )


def published(model: Decoder, format: str) -> WeightVersion:
    return packed(model.state_dict(), format, model.config.to_hf())


async def _generate(
    run: Run, weights: WeightVersion, requests: list[Request]
) -> list[list[Completion]]:
    engine = build_engine(run.rollout.engine)
    await engine.start()
    await engine.load_weights(weights)
    try:
        return await asyncio.gather(*map(engine.generate, requests))
    finally:
        await engine.close()


@torch.no_grad()
def compared(run: Run, model: Decoder, batch: PackedBatch, replay: bool) -> dict[str, float]:
    """KL(behaviour || learner) by the k3 estimator, the largest w, its effective sample size, and the share of
    routes (token, layer) that the learner would not take."""
    routing = routing_for(model, batch, replay)
    assert routing is not None
    hidden = model(batch.token_ids, batch.layout, routing)[batch.predict]
    logprobs, _ = logprobs_of(model, hidden, batch, run.rollout.sampling.temperature)
    d = (logprobs - batch.behavior_logprobs).double()
    w = d.exp()
    disagreement = routed(routing, batch, model.config).metrics["routing/disagreement"].value()
    assert disagreement is not None
    return {
        "kl": float((w - 1 - d).mean()),
        "weight_max": float(w.max()),
        "ess": float(w.sum() ** 2 / (len(w) * w.square().sum())),
        "disagreement": disagreement,
    }


if __name__ == "__main__":
    typer.run(main)
