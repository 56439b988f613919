"""The penalty for moving away from a frozen reference policy, in the loss or in the reward; and a teacher's
advantages.

The KL is estimated per token from d = log π_ref - log π_θ: k1 = -d, k2 = d²/2, k3 = exp(d) - d - 1
(Schulman, "Approximating KL divergence", 2020). k1 is unbiased but may be negative; k3 is unbiased and never
negative. As a loss, k2 has the gradient of the true KL, while the gradient of k1 has mean 0.
"""

from dataclasses import replace

import torch
from torch import Tensor

from areal_q.algorithms.loss_types import LossInputs
from areal_q.algorithms.ratios import bounded_exp
from areal_q.algorithms.reducers import Mean, Metrics
from areal_q.config.learner import TeacherConfig
from areal_q.config.objectives import ReferenceKl
from areal_q.errors import RecordError


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


@torch.no_grad()
def taught(inputs: LossInputs, cfg: TeacherConfig) -> tuple[LossInputs, Metrics]:
    """Returns `inputs` with the teacher's part in the advantage of each token, and what it says.

        A_t ← A_t + coef · clamp(log π_T(y_t) - log π_prox(y_t), ±most_nats)

    The student draws y itself, so that log π_prox - log π_T estimates the reverse KL of its next-token
    distribution to the teacher's, and the policy gradient descends that KL, token by token: on-policy
    distillation (Agarwal et al., arXiv 2306.13649; Gu et al., arXiv 2306.08543; Thinking Machines Lab,
    "On-Policy Distillation", 2025, whose advantage this is). Raises RecordError if no teacher scored the
    tokens.
    """
    if inputs.teacher_logprobs is None:
        raise RecordError("learner.teacher: these groups were scored by no teacher")
    d = torch.where(inputs.mask, inputs.teacher_logprobs - inputs.proximal_logprobs, 0.0)
    advantages = inputs.advantages + cfg.coef * d.clamp(-cfg.most_nats, cfg.most_nats)
    kl, k3, tokens = torch.stack(
        [x.double().sum() for x in (-d, bounded_exp(d) - d - 1, inputs.mask)]
    ).tolist()
    metrics: Metrics = {"teacher/kl": Mean(kl, tokens), "teacher/kl_k3": Mean(k3, tokens)}
    return replace(inputs, advantages=advantages), metrics
