"""A 100M-parameter decoder in real training, for bench/weights/deltas.py: weights before and after one Adam
step.

    python -m bench.weights.training TEXT OUT

TEXT is read as bytes (GSM8K's train.jsonl, say): next-byte loss, float32 master weights, AdamW(0.9, 0.95),
gradients clipped at 1. WARM steps at lr 3e-4 take the model off its initialisation; from there on, for each
learning rate, FOLLOWED steps follow, and the weights around the last one are written to
OUT/{before,after}-LR.safetensors. About 4 CPU seconds a step.
"""

import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from areal_q.config import AdamW
from areal_q.models import Decoder, DecoderConfig, init_weights
from areal_q.models.packed_layout import PackedLayout
from bench.common import say
from learner.optim.build import build_optimizer, optimizer_step

LEARNING_RATES = ("1e-6", "1e-5")
WARM, FOLLOWED = 40, 16
SEQUENCES, TOKENS = 8, 64
CONFIG = DecoderConfig(
    family="qwen3",
    vocab_size=256,
    width=768,
    layers=14,
    heads=12,
    kv_heads=12,
    head_dim=64,
    mlp=2048,
    max_positions=TOKENS,
)


class Run:
    """One training run; deterministic."""

    def __init__(self, text: bytes) -> None:
        self.model = Decoder(CONFIG)
        init_weights(self.model, seed=0)
        self._optimizer = build_optimizer(self.model, AdamW())
        self._text = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
        self._layout = PackedLayout.of([TOKENS] * SEQUENCES)
        self._generator = torch.Generator().manual_seed(0)

    def step(self, lr: float) -> float:
        starts = torch.randint(
            len(self._text) - TOKENS - 1, (SEQUENCES, 1), generator=self._generator
        )
        rows = self._text[starts + torch.arange(TOKENS + 1)]
        hidden = self.model(rows[:, :-1].reshape(-1), self._layout)
        loss = F.cross_entropy(self.model.logits(hidden), rows[:, 1:].reshape(-1))
        loss.backward()
        optimizer_step(self.model, self._optimizer, lr, 1.0)
        return loss.item()

    def state(self) -> dict[str, torch.Tensor]:
        return {name: p.detach().clone() for name, p in self.model.state_dict().items()}


def main(text: Path, out: Path) -> None:
    out.mkdir(parents=True, exist_ok=True)
    for lr in LEARNING_RATES:
        run = Run(text.read_bytes())
        say(f"{sum(p.numel() for p in run.model.parameters()):,} parameters, lr {lr}")
        for step in range(WARM):
            loss = run.step(3e-4 * (step + 1) / WARM)
            say(f"warm {step}: {loss:.3f}")
        for step in range(FOLLOWED):
            if step == FOLLOWED - 1:
                save_file(run.state(), out / f"before-{lr}.safetensors")
            say(f"lr {lr}, {step}: {run.step(float(lr)):.3f}")
        save_file(run.state(), out / f"after-{lr}.safetensors")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
