"""The penalty for moving away from a frozen reference policy, in the loss or in the reward.

The KL is estimated per token from d = log π_ref - log π_θ: k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1
(Schulman, "Approximating KL divergence", 2020). k1 is unbiased but may be negative; k3 is unbiased and never
negative. As a loss, k2 has the gradient of the true KL, while the gradient of k1 has mean 0.
"""

import torch
from torch import Tensor

from areal_q.algorithms.ratios import bounded_exp
from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config.objectives import ReferenceKl


def kl_estimate(d: Tensor, cfg: ReferenceKl) -> Tensor:
    """Returns the estimate per token, [T] nats, from d = log π_ref - log π_θ [T]; d is clamped before exp."""
    match cfg.estimator:
        case "k1":
            return -d
        case "k2":
            return d.square() / 2
        case "k3":
            return bounded_exp(d) - d - 1


@torch.no_grad()
def reward_penalty(
    logprobs: Tensor, reference_logprobs: Tensor, mask: Tensor, cfg: ReferenceKl
) -> Tensor:
    """Returns coef · KL [T], 0 where masked. Subtract it from the token rewards of GAE, or its sum over a
    response from that response's reward. `logprobs` are those before the update (π_prox)."""
    d = torch.where(mask, reference_logprobs - logprobs, 0.0)
    return cfg.coef * kl_estimate(d, cfg)


@torch.no_grad()
def reference_metrics(d: Tensor, mask: Tensor) -> Metrics:
    """Returns KL(π_θ‖π_ref) by k1 and k3, means in nats over the tokens that π_behav drew, from
    d = log π_ref - log π_θ [T], which is 0 where masked."""
    estimates = (kl_estimate(d, ReferenceKl(estimator=kind)) for kind in ("k1", "k3"))
    k1, k3, tokens = torch.stack([x.double().sum() for x in (*estimates, mask)]).tolist()
    return {"reference/kl": Mean(k1, tokens), "reference/kl_k3": Mean(k3, tokens)}
