"""Our advantages and KL penalties against verl's, areal's and trl's: docs/agreement.md."""

# pyright: reportMissingImports=false, reportArgumentType=false

import types

import numpy as np
import pytest
import torch

from areal_q.algorithms import gae, group_advantages, reward_penalty
from areal_q.config import DrGrpo, Gae, Grpo, Overlong, ReferenceKl, ReinforcePlusPlus, Rloo
from areal_q.tasks.grading.rewards import overlong_penalty
from bench.peers.losses import Padded, areal, trl_scored

pytestmark = [
    pytest.mark.peers,
    pytest.mark.timeout(300),  # the first use of each peer imports it
    pytest.mark.filterwarnings("ignore"),  # theirs
]

GROUPS = torch.tensor([0, 1, 2, 0, 1, 2, 2, 0, 1, 0, 2, 1])
"""Three prompts, their four responses interleaved"""
LENGTHS = torch.tensor([9, 4, 1, 8, 7, 8, 3, 2, 9, 6, 5, 5])
REWARDS = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0, 0.25, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])


def mask_of(lengths=LENGTHS) -> torch.Tensor:
    mask = torch.arange(10) < lengths[:, None]
    mask[0, 3] = mask[3, 0] = False  # tokens of tools
    return mask


def verl(name: str, mask: torch.Tensor, rewards=REWARDS, **more) -> torch.Tensor:
    """verl's advantages of the counted tokens; a response's reward is at its last token."""
    from verl.trainer.ppo.core_algos import get_adv_estimator_fn

    token_rewards = torch.zeros(mask.shape)
    token_rewards[torch.arange(len(rewards)), last(mask)] = rewards
    out, _ = get_adv_estimator_fn(name)(
        token_level_rewards=token_rewards, response_mask=mask.float(), **more
    )
    return out[mask]


def last(mask: torch.Tensor) -> torch.Tensor:
    """[B] the place of each response's last counted token."""
    return mask.shape[1] - 1 - mask.flip(-1).int().argmax(-1)


def per_token(advantages: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return advantages[:, None].expand(mask.shape)[mask]


@pytest.mark.parametrize(
    "cfg, name, more",
    [
        (Grpo(), "grpo", {}),
        (Grpo(), "grpo_vectorized", {}),
        (DrGrpo(), "grpo", {"norm_adv_by_std_in_grpo": False}),
        (Rloo(), "rloo", {}),
        (Rloo(), "rloo_vectorized", {}),
    ],
    ids=str,
)
def test_group_advantages_equal_verls(cfg, name, more):
    mask = mask_of()
    mine = group_advantages(REWARDS, GROUPS, cfg)
    theirs = verl(name, mask, index=GROUPS.numpy(), **more)
    torch.testing.assert_close(per_token(mine, mask), theirs)


@pytest.mark.parametrize("cfg, scale", [(Grpo(eps=1e-4), "group"), (DrGrpo(), "none")], ids=str)
def test_group_advantages_equal_trls(cfg, scale):
    order = GROUPS.argsort(stable=True)  # TRL holds a prompt's responses together
    zeros = torch.zeros(mask_of().shape)
    batch = Padded(
        logprobs=zeros,
        proximal=zeros,
        behavior=zeros,
        advantages=zeros,
        mask=mask_of(),
        lengths=LENGTHS,
    )
    theirs = trl_scored(REWARDS[order], 4, batch, scale_rewards=scale)["advantages"]
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, cfg)[order], theirs)


@pytest.mark.parametrize(
    "cfg, theirs",
    [
        (Grpo(eps=1e-5), {"mean_level": "group", "std_level": "group"}),
        (Grpo(eps=1e-5, std="population"), {"std_unbiased": False}),
        (DrGrpo(), {"std_level": None}),
        (Rloo(), {"std_level": None, "mean_leave1out": True}),
        (
            ReinforcePlusPlus(eps=1e-5),
            {"mean_level": "batch", "std_level": "batch", "std_unbiased": False},
        ),
    ],
    ids=str,
)
def test_group_advantages_equal_areals_reward_normalization(cfg, theirs):
    order = GROUPS.argsort(stable=True)
    settings = {"mean_level": "group", "std_level": "group", "group_size": 4, "std_unbiased": True}
    norm_config = areal("api.cli_args").NormConfig(**settings | {"eps": 1e-5} | theirs)
    normalize = areal("utils.data").Normalization(norm_config)
    expected = normalize(REWARDS[order])
    torch.testing.assert_close(group_advantages(REWARDS, GROUPS, cfg)[order], expected)


def test_reinforce_plus_plus_equals_verls_at_equal_lengths():
    """verl's variance is over tokens and divided by their number - 1."""
    mask = mask_of(torch.full_like(LENGTHS, 10)) | True
    tokens = mask.sum()
    by_samples = (1 - 1 / tokens).sqrt()
    for cfg, name, more in (
        (ReinforcePlusPlus(), "reinforce_plus_plus", {"config": types.SimpleNamespace(gamma=1.0)}),
        (
            ReinforcePlusPlus(baseline="group"),
            "reinforce_plus_plus_baseline",
            {"index": GROUPS.numpy()},
        ),
    ):
        mine = per_token(group_advantages(REWARDS, GROUPS, cfg), mask)
        torch.testing.assert_close(mine * by_samples, verl(name, mask, **more))


def token_inputs(seed=0):
    """rewards, values and log-probs of two policies, [B, T] each."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, *mask_of().shape, generator=g)


@pytest.mark.parametrize("discount, trace", [(1.0, 1.0), (1.0, 0.95), (0.9, 0.8)])
def test_gae_equals_verls(discount, trace):
    from verl.trainer.ppo.core_algos import compute_gae_advantage_return

    mask = mask_of()
    rewards, values, _, _ = token_inputs()
    rewards = rewards * mask
    ids = torch.arange(len(mask)).repeat_interleave(10)
    cfg = Gae(discount=discount, trace=trace)
    mine, returns = gae(rewards.flatten(), values.flatten(), mask.flatten(), ids, cfg)
    theirs, their_returns = compute_gae_advantage_return(
        rewards, values, mask.float(), discount, trace
    )
    torch.testing.assert_close(returns[mask.flatten()], their_returns[mask], rtol=1e-4, atol=1e-5)
    # verl divides the variance by the number of tokens - 1.
    by_samples = (1 - 1 / mask.sum()).sqrt()
    mine = mine[mask.flatten()] * by_samples
    torch.testing.assert_close(mine, theirs[mask], rtol=1e-4, atol=1e-5)


def areal_advantages(rewards, values, mask, kl: float = 0.0, *, reference, logprobs, width: int):
    """areal's PPOActor._compute_advantages: position 0 is a prompt's last token, `width` that of the batch."""
    actor = areal("trainer.ppo.actor").PPOActor
    state = types.SimpleNamespace(
        config=types.SimpleNamespace(
            overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True
        ),
        reward_bias=0.0,
        reward_scaling=1.0,
        reward_clip=1e9,
        reward_norm=None,
        adv_norm=None,
        kl_ctl=kl,
        kl_estimator=areal("utils.data").KLEstimator("k1"),
        mask_no_eos_with_zero=False,
        discount=0.9,
        gae_lambda=0.8,
    )

    def padded(x, left: int):
        return torch.nn.functional.pad(x, (left, width - left - x.shape[1]))

    lengths = last(mask) + 1
    attention = (torch.arange(width) <= lengths[:, None]).long()
    data = {
        "input_ids": attention,
        "attention_mask": attention,
        "rewards": rewards,
        "loss_mask": padded(mask, 1),
        "logprobs": padded(logprobs, 1),
        "ref_logp": padded(reference, 0),
        "values": padded(values, 0),
    }
    return actor._compute_advantages(state, data)


def test_gae_and_the_kl_in_the_reward_equal_areals():
    mask = mask_of()
    _, values, logprobs, reference = token_inputs()
    out = areal_advantages(
        REWARDS, values, mask, 0.1, logprobs=logprobs, reference=reference, width=12
    )
    penalty = ReferenceKl(coef=0.1, estimator="k1", place="reward")
    rewards = -reward_penalty(logprobs, reference, mask, penalty)
    rewards[torch.arange(len(mask)), last(mask)] += REWARDS
    ids = torch.arange(len(mask)).repeat_interleave(10)
    cfg = Gae(discount=0.9, trace=0.8, normalize=False)
    mine, returns = gae(rewards.flatten(), values.flatten(), mask.flatten(), ids, cfg)
    torch.testing.assert_close(mine[mask.flatten()], out["advantages"][:, :10][mask])
    torch.testing.assert_close(returns[mask.flatten()], out["returns"][:, :10][mask])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_equal_areals(estimator):
    mask = mask_of()
    _, _, logprobs, reference = token_inputs()
    mine = reward_penalty(logprobs, reference, mask, ReferenceKl(coef=1.0, estimator=estimator))
    theirs = areal("utils.data").KLEstimator(estimator, apply_clamp=False)(logprobs, reference)
    torch.testing.assert_close(mine[mask], theirs[mask])


def test_overlong_penalty_equals_areals_up_to_the_longest():
    lengths = torch.tensor([1, 12, 13, 14, 16])
    mask = torch.arange(16) < lengths[:, None]
    data = {"rewards": torch.zeros(5), "input_ids": mask.long(), "loss_mask": mask}
    areal("utils.functional.functional").reward_overlong_penalty(data, 4, 1.0, 16)
    cfg = Overlong(max_tokens=16, cache_tokens=4)
    mine = torch.tensor([overlong_penalty(tokens, cfg) for tokens in lengths.tolist()])
    torch.testing.assert_close(mine, data["rewards"])


# ---- Known disagreements. Each says which side does what, and fails when a peer changes its mind.


def test_group_of_one_has_advantage_reward_in_verl_zero_in_ours():
    one, mask = torch.tensor([5.0]), torch.ones(1, 3).bool()
    for name, cfg in (("grpo", Grpo()), ("rloo", Rloo())):
        theirs = verl(name, mask, one, index=np.array([0]))
        torch.testing.assert_close(theirs, torch.full((3,), 5.0))
        assert group_advantages(one, torch.tensor([0]), cfg).tolist() == [0.0]


def test_verl_normalizes_over_tokens_and_ours_over_responses():
    """A token mean weighs a long response more: the mean of ours is 0 over responses, of verl's over tokens."""
    mask = mask_of()
    mine = group_advantages(REWARDS, GROUPS, ReinforcePlusPlus())
    theirs = verl("reinforce_plus_plus", mask, config=types.SimpleNamespace(gamma=1.0))
    assert theirs.mean().abs() < 1e-6 and mine.mean().abs() < 1e-6
    assert per_token(mine, mask).mean().abs() > 0.05


def test_overlong_penalty_falls_on_in_areal_and_ends_in_ours():
    mask = torch.ones(1, 20).bool()
    data = {"rewards": torch.zeros(1), "input_ids": mask.long(), "loss_mask": mask}
    areal("utils.functional.functional").reward_overlong_penalty(data, 4, 1.0, 16)
    assert data["rewards"].item() == -2
    cfg = Overlong(max_tokens=16, cache_tokens=4)
    assert overlong_penalty(20, cfg) == -1


def test_cut_off_response_ends_in_areals_value_and_in_our_zero():
    mask = torch.ones(1, 9).bool()
    zeros, values = torch.zeros(1, 9), torch.ones(1, 10)
    whole = {"logprobs": zeros, "reference": zeros}
    cut = areal_advantages(torch.zeros(1), values, mask, **whole, width=10)
    ended = areal_advantages(torch.zeros(1), values, mask, **whole, width=11)
    cfg = Gae(discount=0.9, trace=0.8, normalize=False)
    mine, _ = gae(zeros[0], torch.ones(9), mask[0], torch.zeros(9).long(), cfg)
    torch.testing.assert_close(mine, ended["advantages"][0, :9])
    assert cut["advantages"][0, 8].item() == pytest.approx(mine[8].item() + 0.9)
