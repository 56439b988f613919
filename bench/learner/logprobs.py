"""Log-probs and entropies of 2,048 tokens over a vocabulary of 152k, with gradients, beside their definition.

    python -m bench.learner.logprobs [D]          D as Qwen2.5-0.5B has it unless given

Peak memory beyond the inputs, by torch's own record of allocations, and CPU seconds of one thread.
"""

import sys
import time

import torch

from areal_q.models.logprobs import blockwise, whole
from bench.common import commit, device, number, publish, table
from bench.learner.memory import peak_bytes

TOKENS, VOCABULARY, AIM = 2048, 151_936, 0.2


def main(width: int = 896) -> None:
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, width, generator=generator).requires_grad_()
    weight = (torch.randn(VOCABULARY, width, generator=generator) * 0.02).requires_grad_()
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    rows, memory = [], {}
    for name, way in {"whole logits": whole, "ours, blockwise": blockwise}.items():
        hidden.grad = weight.grad = None

        def work(way=way) -> None:
            logprobs, _ = way(hidden, weight, targets, 1.0, False)
            logprobs.sum().backward()

        began = time.process_time()
        memory[name] = peak_bytes(work)
        seconds = time.process_time() - began
        assert hidden.grad is not None
        share = memory[name] / memory["whole logits"]
        cells = [*map(number, (memory[name] / 2**20, share, seconds))]
        rows.append([name, *cells, f"{float(hidden.grad.norm()):.6g}"])
    header = [
        "log-probs and entropy",
        "peak, MiB",
        f"of whole (aim {AIM:g})",
        "CPU s",
        "norm of ∂hidden",
    ]
    facts = (
        f"{device()}; commit {commit()}; T = {TOKENS:,}, V = {VOCABULARY:,}, D = {width}, float32"
    )
    publish("logprobs", f"{facts}\n\n{table(header, rows)}", memory)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
