"""A stage's critic (learner/backends/critic.py), on the policy's trunk or on its own trunk beside that.

    policy's stage ─┬─ [N, 1, D] of each, side by side ─▶ next stage … ─▶ log-probs, entropy ─┬─▶ loss
    critic's stage ─┘                                                  └▶ values ────────────┘

Every stage has a value head, because Megatron's optimizer expects parameters on each; only the
last one is used.
"""
# pyright: reportMissingImports=false

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor, nn

from areal_q.config import Lora, MegatronBackend
from areal_q.models import DecoderConfig
from areal_q.models.layers.norm import wide
from learner.backends.megatron.layers.lora import AdapterSettings, split
from learner.backends.megatron.model import MegatronModel
from learner.backends.megatron.tensor_names import WHOLE, TensorEntry, entries
from learner.data.packing import PackedBatch


class ValueHead(nn.Module):
    """A value head on the policy's hidden states."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.value = nn.Linear(config.hidden_size, 1)


class CriticTrunk(MegatronModel):
    """The critic's own trunk, with the value head."""

    def __init__(
        self,
        shape: DecoderConfig,
        config: TransformerConfig,
        stage: int,
        lora: AdapterSettings | None,
    ) -> None:
        super().__init__(msgspec.structs.replace(shape, tied=False), config, stage, lora=lora)
        self.output_layer = None
        self.value = nn.Linear(config.hidden_size, 1)


class PolicyAndCritic(nn.Module):
    """The policy and the critic as one model for Megatron's schedules."""

    def __init__(self, policy: MegatronModel, critic: CriticTrunk) -> None:
        super().__init__()
        self.config, self.model_type = policy.config, policy.model_type
        self.parts = nn.ModuleList([policy, critic])

    def set_input_tensor(self, tensors: list[Any]) -> None:
        """Receives the output of the stage before: [[N, 1, 2 · D]], or [None] on the first stage."""
        (x,) = tensors
        halves = (None, None) if x is None else x.chunk(2, -1)
        for part, half in zip(self.parts, halves, strict=True):
            part.set_input_tensor([half])  # type: ignore[operator]

    def forward(self, batch: PackedBatch) -> Tensor:
        return torch.cat([part(batch) for part in self.parts], -1)


def values(critic: ValueHead | CriticTrunk, hidden: Tensor, batch: PackedBatch) -> Tensor:
    """Returns values, float32 [T], from the critic's hidden states [N, 1, D]."""
    head, states = critic.value, hidden[batch.predict, 0]
    return F.linear(wide(states), wide(head.weight), wide(head.bias)).squeeze(-1)


def critic_entries(
    shape: DecoderConfig, backend: MegatronBackend, trunk: bool, lora: Lora | None
) -> tuple[list[TensorEntry], list[TensorEntry]]:
    """Returns (trainable entries, frozen entries) of the critic, with the names of
    learner/backends/critic.py."""
    learning, frozen, stages = [], [], backend.pipeline
    if trunk:
        headless = msgspec.structs.replace(shape, tied=True)
        whole = [e for e in entries(headless, stages, backend.experts) if not e.copy]
        learning, frozen = (
            [replace(e, sources=tuple(map(renamed, e.sources))) for e in plan]
            for plan in split(whole, lora)
        )
    heads = (f"head.{kind}" for kind in ("weight", "bias"))
    learning += [
        TensorEntry(stages - 1, name.replace("head", "value"), (name,), *WHOLE) for name in heads
    ]
    return learning, frozen


def critic_shapes(
    shapes: Mapping[str, torch.Size], width: int, trunk: bool
) -> dict[str, torch.Size]:
    """Returns the shapes of the critic's tensors, in their order, from those of the policy's."""
    names = [name for name in shapes if trunk and name.startswith("model.")]
    return {renamed(name): shapes[name] for name in names} | {
        "head.weight": torch.Size([1, width]),
        "head.bias": torch.Size([1]),
    }


def renamed(name: str) -> str:
    """Returns the name in the critic's trunk of the tensor `name` of the policy."""
    return name.replace("model.", "trunk.", 1)
