"""The critic of PPO: a value for the state before every response token."""

from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from areal_q.config import CriticConfig
from areal_q.models import Decoder
from areal_q.models.layers.linear import Linear
from areal_q.models.layers.norm import wide
from areal_q.models.low_bit.bf16_rounding import round_rest
from areal_q.models.low_bit.quantized_forward import use
from learner.data.packing import PackedBatch
from learner.optim.build import build_optimizer


class Critic(nn.Module):
    """A linear head on the hidden states of its own trunk or of the policy's, and its optimizer.

    All values are 0 at first, so that the first advantages are the returns themselves. The critic is no part of
    the policy: it is neither published nor exported.
    """

    def __init__(self, policy: Decoder, cfg: CriticConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.trunk = policy.copied_trunk() if cfg.trunk == "separate" else None
        if self.trunk is not None:
            use(Linear, self.trunk, "")  # the trunk is not published, so it need not be quantized
            round_rest(self.trunk, False)
        device = next(policy.parameters()).device
        self.head = nn.Linear(policy.head.shape[1], 1, device=device)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """The critic's optimizer, built at its first use as the policy's is."""
        return build_optimizer(self, self.cfg.optimizer)

    def forward(self, hidden: Tensor, batch: PackedBatch) -> Tensor:
        """Returns the values, float32 [T], from the policy's hidden states [T, D] that predict the tokens."""
        if self.trunk is not None:
            hidden = self.trunk(batch.token_ids, batch.layout)[batch.predict]
        head = self.head  # of ranks in bfloat16 it is that, whose numbers near 100 are 0.5 apart
        return F.linear(wide(hidden), wide(head.weight), wide(head.bias)).squeeze(-1)
