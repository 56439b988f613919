"""Ours and the peers' loss and gradient, turn by turn: `python -m bench.peers.time_losses SPEC.json`.

Runs in the environment of requirements.txt, started by bench/shapes/objectives.py. Prints one JSON object:
{"versions": …, "rows": {objective: {side: {"cpu_ms": [one for each repeat], "peak_bytes": …, "loss": …}}}}.
"""

# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

import json
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor

from areal_q.algorithms import Totals, loss, loss_fn
from areal_q.config import Acr, Cispo, Gspo, Ppo, Sapo, SeqMeanTokenMean, Tbpo, Tis
from bench.learner import memory
from bench.peers.losses import Padded, areal, areal_loss, trl_loss, verl_correction
from bench.peers.losses import verl_loss as verl


def responses(sequences: int, tokens: int, seed: int) -> Padded:
    """Responses of full length, so that nobody computes on padding; π_θ near π_prox near π_behav."""
    g = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(sequences, tokens, generator=g)

    prox = -normal().abs()
    return Padded(
        logprobs=(prox + 0.1 * normal()).requires_grad_(),
        proximal=prox,
        behavior=prox + 0.1 * normal(),
        advantages=torch.randn(sequences, 1, generator=g).expand(sequences, tokens).contiguous(),
        mask=torch.ones(sequences, tokens, dtype=torch.bool),
        lengths=torch.full((sequences,), tokens),
    )


def contestants(batch: Padded) -> dict[str, dict[str, Callable[[], Tensor]]]:
    """The same number by each side, where it has it. What is constant over the updates on a batch is given."""
    packed = replace(batch.pack(), logprobs=batch.logprobs.detach().flatten().requires_grad_())
    totals = Totals(tokens=batch.mask.sum().item(), sequences=len(batch.mask))
    weights, _ = verl_correction(batch, rollout_is="token", rollout_is_threshold=2.0)
    assert weights is not None
    clamp = {"action": "clamp", "upper": 2.0}
    sequence = {"importance_sampling_level": "sequence"}
    sapo, by_response = areal("utils.functional.functional").sapo_loss_fn, SeqMeanTokenMean()
    given = (batch.logprobs, batch.proximal, batch.advantages, 1.0, 1.05, batch.mask)
    truncate = {"vllm_importance_sampling_mode": "token_truncate"}

    def mine(objective, aggregation=None) -> dict[str, Callable[[], Tensor]]:
        def both() -> Tensor:
            packed.logprobs.grad = None
            return loss_fn(packed, objective, aggregation, totals).loss

        def alone() -> Tensor:
            with patch.object(loss, "diagnostics", lambda *_: {}):
                return both()

        return {"ours": alone, "ours with diagnostics": both}

    return {
        "ppo": mine(Ppo())
        | {
            "verl": lambda: verl(batch),
            "areal": lambda: areal_loss(batch),
            "trl": lambda: trl_loss(batch, loss_type="dapo"),
        },
        "tis": mine(Tis())
        | {
            "verl": lambda: verl(batch, weights=weights),
            "areal": lambda: areal_loss(batch, rejection=clamp),
            "trl": lambda: trl_loss(batch, ratio=weights, loss_type="dapo", **truncate),
        },
        "gspo": mine(Gspo())
        | {
            "verl": lambda: verl(batch, "gspo", clip_ratio_low=3e-4, clip_ratio_high=4e-4),
            "areal": lambda: areal_loss(batch, eps_clip=3e-4, eps_clip_higher=4e-4, **sequence),
            "trl": lambda: trl_loss(
                batch, loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, **sequence
            ),
        },
        "sapo": mine(Sapo(), by_response)
        | {
            "verl": lambda: verl(batch, "sapo"),
            "areal": lambda: sapo(*given)[0],
            "trl": lambda: trl_loss(batch, loss_type="sapo"),
        },
        "cispo": mine(Cispo())
        | {
            "verl": lambda: verl(batch, "cispo", clip_ratio_low=1.0, clip_ratio_high=4.0),
            "trl": lambda: trl_loss(batch, loss_type="cispo", epsilon_high=5.0),
        },
        "acr": mine(Acr()),
        "tbpo": mine(Tbpo()),
    }


def step(batch: Padded, side: Callable[[], Tensor]) -> float:
    batch.logprobs.grad = None
    value = side()
    value.backward()
    return value.item()


def peak_bytes(batch: Padded, side: Callable[[], Tensor]) -> int:
    """The most that a step held at one moment beyond its inputs, by torch's record of allocations."""
    batch.logprobs.grad = None
    return memory.peak_bytes(lambda: side().backward())


def main(path: str) -> None:
    spec = json.loads(Path(path).read_text())
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    batch = responses(spec["sequences"], spec["tokens"], spec["seed"])
    rows = {}
    for name, sides in contestants(batch).items():
        rows[name] = {side: {"loss": step(batch, f), "cpu_ms": []} for side, f in sides.items()}
        for _ in range(spec["repeats"]):
            for side, f in sides.items():
                began = time.process_time()
                step(batch, f)
                rows[name][side]["cpu_ms"].append(1e3 * (time.process_time() - began))
        for side, f in sides.items():
            rows[name][side]["peak_bytes"] = peak_bytes(batch, f)
    versions = {name: version(name) for name in ("torch", "verl", "areal", "trl")}
    print(json.dumps({"versions": versions, "rows": rows}))


if __name__ == "__main__":
    main(sys.argv[1])
