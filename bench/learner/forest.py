"""Passes over episodes that are trees, beside rows that share nothing: `python -m bench.learner.forest`.

Each shape is one group of two episodes. FLOPs are those of products, counted by torch, forward and backward;
`computed` are the tokens that pass through the layers. The turns alternate, and each figure is the median.
"""

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode

from areal_q.config import load
from areal_q.messages import Array, Trajectory, VersionSpan
from areal_q.models import Decoder, DecoderConfig, init_weights
from bench.common import commit, device, publish, say, table
from bench.learner.memory import peak_bytes
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import Sample, pack_samples

EPISODES, PROMPT = 2, 320
SHAPES: dict[str, list[tuple[int | None, int, int]]] = {
    "one answer": [(None, PROMPT, 256)],
    "compaction": [(None, PROMPT, 512), *((0, PROMPT, 512) for _ in range(2))],
    "dropped thinking": [(None, PROMPT, 192), *((i, 448 + 128 * i, 192) for i in range(4))],
    "sub-agents": [(None, PROMPT, 576), *((0, at, 128) for at in (384, 512, 640, 768, 896))],
}
"""The sequences of an episode: (parent, tokens of its path that are shared, tokens of its own)"""
CONFIG = DecoderConfig(
    family="qwen3", vocab_size=2048, width=128, layers=2, heads=4, kv_heads=2, head_dim=32,
    mlp=384, max_positions=4096,
)  # fmt: skip


def samples_of(shape: Sequence[tuple[int | None, int, int]]) -> list[Sample]:
    rng = np.random.default_rng(0)
    prompt, samples = rng.integers(0, CONFIG.vocab_size, PROMPT).astype(np.int32), []
    for _ in range(EPISODES):
        root = len(samples)
        for parent, shared, own in shape:
            before = prompt if parent is None else samples[root + parent].path[:shared]
            drawn = rng.integers(0, CONFIG.vocab_size, own)
            trajectory = Trajectory(
                index=len(samples),
                response_ids=Array.of(drawn, "int32"),
                behavior_logprobs=Array.of(np.full(own, -8.0), "float32"),
                loss_mask=Array.of(np.ones(own), "uint8"),
                spans=[VersionSpan(0, own, "")],
                finish_reason="stop",
                reward=0.0,
            )
            sample = Sample(0, before, trajectory, 1.0, np.zeros(own, np.int64))
            samples.append(sample if parent is None else replace(sample, shared=shared))
    return samples


def measured(policy: TorchPolicy, samples: Sequence[Sample]) -> dict[str, float]:
    """Returns loss, tokens, CPU seconds, FLOPs and bytes of a forward and a backward pass."""
    batch = pack_samples(samples, learns=True)

    def work() -> float:
        policy.model.zero_grad()
        logprobs, _ = token_logprobs(policy.model, batch, 1.0)
        loss = -(logprobs * batch.mask).sum()
        loss.backward()
        return float(loss.detach())

    start = time.process_time()
    loss = work()
    seconds = time.process_time() - start
    with FlopCounterMode(display=False) as counter:
        memory = float(peak_bytes(work))
    tokens = float(len(batch.token_ids))
    flops = float(counter.get_total_flops())
    return {"loss": loss, "computed": tokens, "s": seconds, "flops": flops, "bytes": memory}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    model = Decoder(CONFIG)
    init_weights(model, 0)
    policy = TorchPolicy(model, load(None, ["learner.dtype=float32"]).learner, temperature=1.0)
    rows = []
    for name, shape in SHAPES.items():
        say(name)
        samples = samples_of(shape)
        alone = [replace(s, ticket=i, shared=0) for i, s in enumerate(samples)]
        turns = [(measured(policy, samples), measured(policy, alone)) for _ in range(rounds)]
        forest, apart = ({k: median(t[i][k] for t in turns) for k in turns[0][i]} for i in (0, 1))
        assert np.isclose(forest["loss"], apart["loss"], rtol=1e-5)
        ratios = [f"{apart[k] / forest[k]:.2f}" for k in ("computed", "flops", "s", "bytes")]
        rows.append(
            [
                name, f"{forest['computed']:,.0f} of {apart['computed']:,.0f}",
                f"{forest['s']:.2f} of {apart['s']:.2f}", *ratios,
            ]
        )  # fmt: skip
    head = ["episode", "tokens computed", "CPU s", "tokens ×", "FLOPs ×", "time ×", "memory ×"]
    text = f"{device()}, one thread; commit {commit()}; float32\n\n{table(head, rows)}"
    publish("forest", text, {"rows": rows})


if __name__ == "__main__":
    main()
