"""One learner step: against transformers, against itself cut otherwise, and against common sense."""

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from helpers.fixture_types import MakeGroup, MakeRun, MakeSamples
from helpers.policies import build_policy
from msgspec.structs import replace

from areal_q.algorithms import LossInputs
from areal_q.algorithms.ratios import interpolated_proximal
from areal_q.config import LearnerConfig
from areal_q.errors import ConfigError
from areal_q.messages import Array, Group, Ticket
from areal_q.models import save_decoder
from areal_q.tasks import build_tokenizer
from learner import policy_update as step_module
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import Sample, pack_samples
from learner.measure.token_recorder import TokenRecorder
from learner.optim.build import learning_rate
from learner.policy_update import update_policy
from learner.train_step import response_metrics, source_metrics


def weights(policy: TorchPolicy) -> dict[str, torch.Tensor]:
    return {k: v.detach().clone() for k, v in policy.model.state_dict().items()}


def total_logprobs(policy: TorchPolicy, samples: list[Sample]) -> list[float]:
    """Log-prob of each sample's whole response."""
    batch = pack_samples(samples)
    with torch.no_grad():
        logprobs, _ = token_logprobs(policy.model, batch, policy.temperature)
    totals = torch.zeros(len(samples)).index_add_(0, batch.sequence_ids, logprobs)
    return totals.tolist()


def test_log_probs_equal_transformers_at_the_temperature(
    make_run: MakeRun, make_samples: MakeSamples, tmp_path: Path
):
    from transformers import AutoModelForCausalLM

    run, temperature = make_run(), 0.7
    policy, samples = build_policy(run, temperature), make_samples(9)
    save_decoder(policy.model, tmp_path / "hf", build_tokenizer(run.model, run.task))
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    with torch.no_grad():
        logprobs, entropy = token_logprobs(policy.model, pack_samples(samples), temperature)
        expected, spread = [], []
        for s in samples:
            response = s.trajectory.response_ids.numpy()
            ids = torch.from_numpy(np.concatenate([s.prompt_ids, response])).long()
            scaled = oracle(ids[None]).logits[0, len(s.prompt_ids) - 1 : -1] / temperature
            distribution = torch.distributions.Categorical(logits=scaled)
            expected.append(distribution.log_prob(ids[len(s.prompt_ids) :]))
            spread.append(distribution.entropy())
    torch.testing.assert_close(logprobs, torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.cat(spread), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "aggregation", ["token_mean", "seq_mean_token_mean", {"type": "seq_mean_token_sum_norm"}]
)
def test_the_step_does_not_depend_on_how_the_batch_is_cut(
    make_run: MakeRun, make_samples: MakeSamples, aggregation: str | dict[str, str]
):
    # A large eps makes AdamW's step smooth in the gradient; at 1e-8 rounding alone could turn its sign.
    settings = ["learner.optimizer.eps=1e-2", "learner.optimizer.lr=0.1"]
    name = aggregation if isinstance(aggregation, str) else aggregation["type"]
    settings.append(f"learner.aggregation.type={name}")
    if name == "seq_mean_token_sum_norm":
        settings.append("learner.aggregation.length=8")
    results, metrics = [], []
    for tokens in (14, 17, 64, 10**6):
        policy = build_policy(make_run(*settings, f"learner.microbatch_tokens={tokens}"))
        before = weights(policy)
        for seed in (1, 2):
            values = update_policy(policy, make_samples(15, seed))
        results.append(weights(policy))
        metrics.append(values)
    moved = max(float((results[-1][k] - before[k]).abs().max()) for k in before)
    assert moved > 1e-3
    for other, values in zip(results[:-1], metrics[:-1], strict=True):
        for name, tensor in other.items():
            torch.testing.assert_close(tensor, results[-1][name], atol=1e-3 * moved, rtol=0)
        for key in ("train/loss", "train/grad_norm", "mismatch/kl", "policy/kl_k3"):
            assert values[key] == pytest.approx(metrics[-1][key], rel=1e-3, abs=1e-6)


def test_response_too_long_for_a_micro_batch_is_refused_by_name(
    make_run: MakeRun, make_samples: MakeSamples
):
    samples = make_samples(9)
    longest = max(samples, key=lambda s: s.num_tokens)
    fits = build_policy(make_run(f"learner.microbatch_tokens={longest.num_tokens}"))
    update_policy(fits, samples)
    policy = build_policy(make_run(f"learner.microbatch_tokens={longest.num_tokens - 1}"))
    before = weights(policy)
    where = f"ticket {longest.ticket}, response {longest.trajectory.index} has {longest.num_tokens}"
    with pytest.raises(ConfigError, match=rf"learner.microbatch_tokens = \d+: {where} tokens"):
        update_policy(policy, samples)
    assert all(torch.equal(p, before[name]) for name, p in weights(policy).items())
    with pytest.raises(ConfigError, match=r"learner\.microbatch_tokens = 4 has no room"):
        make_run("learner.microbatch_tokens=4", "rollout.sampling.max_tokens=4")


def test_the_proximal_policy_is_the_one_before_the_first_update(
    make_run: MakeRun, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
):
    policy = build_policy(make_run("learner.minibatches=4", "learner.optimizer.lr=0.05"))
    samples = make_samples(8)
    with torch.no_grad():
        before, _ = token_logprobs(policy.model, pack_samples(samples), 1.0)
    seen = []

    def recording(inputs, *args, **more):
        seen.append(inputs)
        return original(inputs, *args, **more)

    original = step_module.loss_fn
    monkeypatch.setattr(step_module, "loss_fn", recording)
    update_policy(policy, samples)

    assert len(seen) == 4
    proximal = torch.cat([inputs.proximal_logprobs for inputs in seen])
    torch.testing.assert_close(proximal, before, atol=1e-5, rtol=1e-5)
    assert not proximal.requires_grad
    # The first update starts from it, the last one is well on its way.
    torch.testing.assert_close(seen[0].logprobs, seen[0].proximal_logprobs, atol=1e-5, rtol=1e-5)
    assert (seen[-1].logprobs - seen[-1].proximal_logprobs).abs().max() > 1e-2


@pytest.mark.parametrize("more", [[], ["learner.epochs=2"], ["learner.minibatches=2"]])
def test_the_first_update_scores_its_batches_to_the_same_bits(
    make_run: MakeRun, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch, more: list[str]
):
    settings = ["learner.minibatches=1", "learner.microbatch_tokens=40", *more]
    outcomes, passes = [], []
    for late in (True, False):
        if not late:
            monkeypatch.setattr(LearnerConfig, "update_scores_itself", False)
        policy, recorder = build_policy(make_run(*settings)), TokenRecorder()
        forward = policy.model.forward
        calls: list[int] = []

        def counted(*args, forward=forward, calls=calls):
            calls.append(1)
            return forward(*args)

        policy.model.forward = counted  # type: ignore[method-assign]
        values = update_policy(policy, make_samples(12), recorder)
        outcomes.append((weights(policy), values, recorder.scores()))
        passes.append(len(calls))
    (one, metrics, tokens), (other, metrics_again, tokens_again) = outcomes
    assert passes[0] < passes[1]
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics == metrics_again
    for name in ("proximal_logprobs", "logprobs", "entropy"):
        assert np.array_equal(getattr(tokens, name), getattr(tokens_again, name)), name


def test_interpolated_proximal_policy_needs_no_pass_of_its_own(
    make_run: MakeRun, make_samples: MakeSamples, monkeypatch: pytest.MonkeyPatch
):
    seen: dict[str, list[LossInputs]] = {"exact": [], "loglinear": []}
    passes = []
    original = step_module.loss_fn
    for name, inputs in seen.items():
        policy = build_policy(
            make_run(
                "learner.minibatches=2", f"learner.proximal={name}", "learner.optimizer.lr=1e-4"
            )
        )
        forward, calls = policy.model.forward, []

        def counted(*args, forward=forward, calls=calls):
            calls.append(1)
            return forward(*args)

        def recording(x, *args, inputs=inputs, **more):
            inputs.append(x)
            return original(x, *args, **more)

        policy.model.forward = counted  # type: ignore[method-assign]
        monkeypatch.setattr(step_module, "loss_fn", recording)
        update_policy(policy, make_samples(8))
        passes.append(len(calls))
    assert passes == [3, 2]
    (first, second), (same, near) = seen["exact"], seen["loglinear"]
    assert torch.equal(first.proximal_logprobs, same.proximal_logprobs)
    share = near.version_lag / (near.version_lag + 1)
    expected = (1 - share) * near.behavior_logprobs + share * near.logprobs.detach()
    torch.testing.assert_close(near.proximal_logprobs, expected)
    assert not near.proximal_logprobs.requires_grad
    assert not torch.equal(near.proximal_logprobs, second.proximal_logprobs)


def test_interpolation_meets_its_table():
    logprobs, behavior = torch.tensor([-1.0, -1.0, -1.0]), torch.tensor([-2.0, -3.0, -5.0])
    found = interpolated_proximal(logprobs, behavior, torch.tensor([0, 1, 3]))
    assert found.tolist() == [-2.0, -2.0, -2.0]


def test_interpolation_is_refused_where_scores_are_needed_before(make_run: MakeRun):
    for more in ("learner.objective.denominator=kept_tokens", "learner.router_aux_coef=0.1"):
        with pytest.raises(ConfigError, match=r"learner\.proximal = 'loglinear' leaves out"):
            make_run("learner.proximal=loglinear", "learner.objective.type=mis", more)


def test_same_samples_and_weights_give_bit_equal_weights(
    make_run: MakeRun, make_samples: MakeSamples
):
    results = []
    for _ in range(2):
        policy = build_policy(make_run("learner.microbatch_tokens=40"))
        values = [update_policy(policy, make_samples(12, seed)) for seed in range(3)]
        results.append((weights(policy), values))
    (one, metrics), (other, metrics_again) = results
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert metrics == metrics_again


def test_rewarded_response_gets_likelier_and_a_punished_one_less(
    make_run: MakeRun, make_samples: MakeSamples
):
    policy = build_policy(make_run("learner.minibatches=1", "learner.optimizer.warmup_steps=0"))
    samples = []
    for sample, advantage in zip(make_samples(6), [1.0, -1.0] * 3, strict=True):
        batch = pack_samples([sample])
        with torch.no_grad():
            logprobs, _ = token_logprobs(policy.model, batch, 1.0)
        trajectory = msgspec.structs.replace(
            sample.trajectory,
            behavior_logprobs=Array.of(logprobs.numpy(), "float32"),
            loss_mask=Array.of(np.ones(len(logprobs)), "uint8"),
        )
        samples.append(dataclasses.replace(sample, trajectory=trajectory, advantage=advantage))
    before = total_logprobs(policy, samples)
    update_policy(policy, samples)
    change = [after - b for after, b in zip(total_logprobs(policy, samples), before, strict=True)]
    assert min(change[::2]) > 0 > max(change[1::2])


def test_masked_tokens_teach_nothing(make_run: MakeRun, make_samples: MakeSamples):
    def masked(sample: Sample) -> Sample:
        zeros = Array.of(np.zeros(sample.trajectory.num_tokens), "uint8")
        trajectory = msgspec.structs.replace(sample.trajectory, loss_mask=zeros)
        return dataclasses.replace(sample, trajectory=trajectory)

    policy = build_policy(make_run())
    before = weights(policy)
    update_policy(policy, [masked(s) for s in make_samples(4)])
    assert all(torch.equal(before[k], v) for k, v in weights(policy).items())


def test_tokens_of_several_epochs_are_counted_once(make_run: MakeRun, make_samples: MakeSamples):
    """Losses are sums over all optimizer steps, and train/loss is their mean."""
    samples = make_samples(9)
    once, thrice = (
        update_policy(build_policy(make_run(f"learner.epochs={n}")), samples) for n in (1, 3)
    )
    counts = {name: value for name, value in once.items() if name.endswith("/tokens")}
    assert counts.keys() > {"mismatch/tokens"}
    assert {name: thrice[name] for name in counts} == counts
    assert counts["mismatch/tokens"] == pack_samples(samples).mask.sum()
    steps = 3 * make_run().learner.minibatches
    assert thrice["train/loss"] == pytest.approx(thrice["loss/total"] / steps)


def test_step_with_a_nonfinite_gradient_is_skipped_and_counted(
    make_run: MakeRun, make_samples: MakeSamples
):
    policy = build_policy(make_run("learner.minibatches=2"))
    before = weights(policy)
    parameter = policy.model.model.norm.weight
    hook = parameter.register_hook(lambda grad: grad * math.nan)
    values = update_policy(policy, make_samples(6))
    assert all(torch.equal(before[k], v) for k, v in weights(policy).items())
    assert (policy.updates, policy.skipped, values["train/skipped_steps"]) == (2, 2, 2)

    hook.remove()
    values = update_policy(policy, make_samples(6))
    assert (policy.updates, policy.skipped, values["train/skipped_steps"]) == (4, 2, 2)
    after = weights(policy)
    assert all(v.isfinite().all() for v in after.values())
    assert any(not torch.equal(before[k], v) for k, v in after.items())


def test_a_skipped_step_has_its_rate_after_a_resumption_too(
    make_run: MakeRun, make_samples: MakeSamples
):
    """A resumed learner has the number of updates, and no rate of an optimizer that took one."""
    run = make_run("learner.optimizer.warmup_steps=10")
    policies = uninterrupted, resumed = build_policy(run), build_policy(run)
    update_policy(uninterrupted, make_samples(6))
    resumed.updates = uninterrupted.updates
    rates = list[float]()
    for policy in policies:
        policy.model.model.norm.weight.register_hook(lambda grad: grad * math.inf)
        rates.append(update_policy(policy, make_samples(6))["train/lr"])
    assert rates == [learning_rate(run.learner.optimizer, uninterrupted.updates - 1)] * 2


def test_the_learning_rate_rises_linearly_and_then_stays(make_run: MakeRun):
    cfg = make_run("learner.optimizer.lr=0.3", "learner.optimizer.warmup_steps=2").learner.optimizer
    rates = [learning_rate(cfg, update) for update in range(5)]
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.3, 0.3])


def test_weight_decay_spares_norms(make_run: MakeRun):
    policy = build_policy(make_run("learner.optimizer.weight_decay=0.1"))
    decays = {
        id(p): group["weight_decay"]
        for group in policy.optimizer.param_groups
        for p in group["params"]
    }
    for name, parameter in policy.model.named_parameters():
        assert decays[id(parameter)] == (0.0 if "norm" in name else 0.1), name


@pytest.mark.parametrize("precision", ["full", "qarl", "jet"])
def test_in_bfloat16_only_the_products_are_coarser(
    make_run: MakeRun, make_samples: MakeSamples, precision: str
):
    format = "int8" if precision == "qarl" else "fp8"
    settings = [f"learner.precision={precision}", f"rollout.format={format}"]
    fine = build_policy(make_run(*settings))
    coarse = build_policy(make_run(*settings, "learner.dtype=bfloat16"))
    samples = make_samples(9)
    with torch.no_grad():
        a, b = (token_logprobs(t.model, pack_samples(samples), 1.0) for t in (fine, coarse))
    for exact, rounded in zip(a, b, strict=True):
        assert rounded.dtype == torch.float32
        gap = (exact - rounded).abs().max()
        # An operand that rounds otherwise in bfloat16 may fall to FP8's next number, a sixteenth away.
        assert 0 < gap < (0.5 if precision == "jet" else 0.1)
    before, metrics = weights(coarse), update_policy(coarse, samples)
    update_policy(fine, samples)
    assert math.isfinite(metrics["train/loss"]) and metrics["train/grad_norm"] > 0
    moves = []
    for policy in (fine, coarse):
        after = weights(policy)
        assert all(w.dtype == torch.float32 for w in after.values())
        moves.append(torch.cat([(after[k] - w).flatten() for k, w in before.items()]))
    assert (
        torch.cosine_similarity(*moves, dim=0) > 0.9
    )  # Adam's first step is a sign: small ones may turn
    state = coarse.optimizer.state[coarse.model.head]
    assert state["exp_avg"].dtype == torch.float32


def test_cut_responses_and_uniform_groups_are_counted_by_hand(
    make_ticket: Callable[..., Ticket], make_group: MakeGroup
):
    def group(number: int, *responses: tuple[float, str, bool]) -> Group:
        """(reward, finish reason, whether the reward is valid) of each response, of 2, 3, … tokens."""
        made = make_group(make_ticket(number, group_size=len(responses)))
        fields = ("reward", "finish_reason", "valid")
        trajectories = [
            replace(t, **dict(zip(fields, response, strict=True)))
            for t, response in zip(made.trajectories, responses, strict=True)
        ]
        return replace(made, trajectories=trajectories)

    mixed = group(0, (0.0, "stop", True), (1.0, "length", True), (5.0, "length", False))
    uniform = group(1, (0.5, "stop", True), (0.5, "timeout", True))
    alone = group(2, (1.0, "stop", True), (0.0, "stop", False))
    values = response_metrics([mixed, uniform, alone])
    assert values["response/cut_off_share"] == pytest.approx(2 / 5)
    assert values["response/tokens_mean"] == pytest.approx((2 + 3 + 2 + 3 + 2) / 5)
    assert values["reward/uniform_share"] == pytest.approx(1 / 2)
    assert "reward/uniform_share" not in response_metrics([alone])


def test_each_task_of_a_mixture_has_figures_of_its_own(make_ticket, make_group):
    def group(source: str, *rewards: float) -> Group:
        made = make_group(make_ticket(source=source, group_size=len(rewards)))
        trajectories = [
            replace(t, reward=reward) for t, reward in zip(made.trajectories, rewards, strict=True)
        ]
        return replace(made, trajectories=trajectories)

    groups = [group("a", 1, 0), group("b", 2, 2), group("a", 1, 1), group("a", 0, 1)]

    assert source_metrics(groups) == {
        **{"source/a/share": 0.75, "source/a/reward_mean": 4 / 6, "source/a/uniform_share": 1 / 3},
        **{"source/b/share": 0.25, "source/b/reward_mean": 2.0, "source/b/uniform_share": 1.0},
    }
    assert source_metrics([group("", 1, 0)]) == {}
