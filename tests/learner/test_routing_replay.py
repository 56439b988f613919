"""Routes of experts from the engine to the learner: recorded, carried along, replayed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
from helpers import engines
from helpers.engines import ask
from helpers.policies import pack_state, save_at
from msgspec.structs import replace as replaced
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from areal_q.checks.model import check_experts
from areal_q.config import LearnerConfig, TorchBackend, TorchEngine, load
from areal_q.errors import ConfigError, RecordError
from areal_q.messages import (
    Array,
    Branch,
    Dtype,
    Group,
    Trajectory,
    VersionSpan,
    decode_group,
    encode,
)
from areal_q.models import Decoder, DecoderConfig, Experts, PackedLayout, init_weights
from areal_q.models.low_bit.engine_policy import engine_policy
from areal_q.models.low_bit.published_state import published_state
from areal_q.quant import FORMATS
from areal_q.quant.state_dict import rest_in_bf16
from areal_q.tasks import Score
from areal_q.weights.version import WeightVersion
from bench.records import drawn_trajectory, make_group, make_ticket
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table
from learner import checkpoint
from learner.backends.data_parallel import ALONE
from learner.backends.precision import set_precision
from learner.backends.routing_replay import balance_weights, routed, routing_for
from learner.backends.single_device import TorchPolicy, token_logprobs
from learner.data.packing import Sample, unlearnt_samples
from learner.data.packing import pack_samples as pack_batch
from learner.data.validation import fits
from learner.policy_update import update_policy
from rollout.engines import ENGINES, build_engine
from rollout.engines.base import Completion
from rollout.environments.base import Response
from rollout.environments.episode_tree import record

ROOM = LearnerConfig()
EXPERTS = Experts(count=8, per_token=2, mlp=32, dense_layers=(1,))
CONFIG = DecoderConfig(
    family="qwen3_moe",
    vocab_size=23,
    width=32,
    layers=3,
    heads=4,
    kv_heads=2,
    head_dim=8,
    mlp=48,
    max_positions=96,
    experts=EXPERTS,
)
SUNK = msgspec.structs.replace(
    CONFIG, family="gpt_oss", layers=2, mlp=32, window=4, sliding=(0,), qkv_bias=True, o_bias=True,
    mlp_bias=True, experts=Experts(count=8, per_token=2, mlp=32),
)  # fmt: skip
"""With sinks, and biases of router and experts, too"""
SINKS = "model.layers.0.self_attn.sinks"


def decoder(seed: int = 0, config: DecoderConfig = CONFIG) -> Decoder:
    model = Decoder(config)
    init_weights(model, seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if config.sinks and p.dim() == 1:
                p.add_(torch.linspace(-0.3, 0.4, len(p)))
            p.mul_(3 if p.dim() == 2 and "embed" not in name else 1).copy_(p.bfloat16())
    return model


def publish(model: Decoder, format: str = "bf16", version: int = 0) -> WeightVersion:
    return pack_state(model.state_dict(), model.config.to_hf(), format, version)


def generate(
    weights: WeightVersion, prompts: Sequence[list[int]], samples: int = 3, **engine
) -> list[list[Completion]]:
    requests = [ask(p, samples, seed, [3], max_tokens=12) for seed, p in enumerate(prompts)]
    config = TorchEngine(**{"slots": 16, "dtype": "float32", **engine})
    return engines.generate(weights, *requests, config=config)


PROMPTS = [[1, 2, 4], [5], [6, 7, 8, 9, 10, 11], [2] * 20, [12, 13], [14, 15, 16], [1, 2, 4, 5]]


def samples(
    results: Sequence[list[Completion]], prompts: Sequence[list[int]] = PROMPTS
) -> list[Sample]:
    return [
        Sample(
            ticket=number,
            prompt_ids=np.array(prompt, np.int32),
            trajectory=drawn_trajectory(index, c),
            advantage=(1.0, -0.5, -0.5)[index],
            lag=np.zeros(len(c.response_ids), np.int64),
        )
        for number, (prompt, completions) in enumerate(zip(prompts, results, strict=True))
        for index, c in enumerate(completions)
    ]


# The engine


@pytest.mark.parametrize(
    ("config", "fused"),
    [(CONFIG, True), (CONFIG, False), (SUNK, True)],
    ids=["fused", "plain", "sinks"],
)
@pytest.mark.parametrize("format", list(FORMATS))
def test_log_probs_and_routes_equal_the_learners(
    format: str, config: DecoderConfig, fused: bool
) -> None:
    weights = publish(decoder(config=config), format)
    found = samples(generate(weights, PROMPTS, fused=fused))
    policy = engine_policy(config, weights.tensors, format)
    batch = pack_batch(found)
    routing = routing_for(policy, batch, replay=False)
    policy(batch.token_ids, batch.layout, routing)
    assert routing is not None and batch.routes is not None
    own = torch.stack([routing.own[layer] for layer in (0, 1)], 1)
    same = (own.sort(-1).values == batch.routes.sort(-1).values).all(-1).float().mean()
    logprobs, _ = token_logprobs(policy, batch, 1.0, replay=True)
    gaps = (logprobs - batch.behavior_logprobs).abs()
    if format in ("int8", "fp8", "fp8-channel", "int4-fp8"):
        # A rounding difference of 1e-7 may tip a quantized activation to the next code, for all that follows.
        assert same > 0.97 and gaps.median() < 1e-5 and gaps.mean() < 0.03
    else:
        assert same == 1 and gaps.max() < 1e-4


def routes_of(c: Completion) -> np.ndarray:
    assert c.routes is not None
    return c.routes


def test_every_token_that_was_an_input_has_its_routes() -> None:
    for prompt, completions in zip(PROMPTS, generate(publish(decoder()), PROMPTS), strict=True):
        for c in completions:
            routes = routes_of(c)
            assert routes.dtype == np.uint8
            assert routes.shape == (len(prompt) + len(c.response_ids) - 1, 2, 2)
            assert (routes[..., 0] != routes[..., 1]).all()
        of_prompt = [routes_of(c)[: len(prompt)] for c in completions]
        assert all(np.array_equal(routes, of_prompt[0]) for routes in of_prompt)


def test_routes_outlive_slots_that_empty_and_fill_again() -> None:
    weights = publish(decoder())
    roomy, crowded = (generate(weights, PROMPTS, slots=slots) for slots in (64, 4))
    for many, few in zip(roomy, crowded, strict=True):
        for a, b in zip(many, few, strict=True):
            assert np.array_equal(a.response_ids, b.response_ids)
            assert np.array_equal(routes_of(a), routes_of(b))


def test_more_than_256_experts_take_two_bytes() -> None:
    experts = Experts(count=300, per_token=2, mlp=8)
    config = msgspec.structs.replace(CONFIG, experts=experts, layers=1)
    model = decoder(config=config)
    found = samples(generate(publish(model), PROMPTS[:2]), PROMPTS[:2])
    routes = [s.trajectory.routes for s in found]
    assert all(r is not None and r.dtype == "uint16" for r in routes)
    assert max(int(r.numpy().max()) for r in routes if r) > 255
    batch = pack_batch(found)
    logprobs, _ = token_logprobs(model, batch, 1.0, replay=True)
    torch.testing.assert_close(logprobs, batch.behavior_logprobs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("kind", sorted(ENGINES.keys() - {"torch", "sglang"}))
def test_an_engine_that_does_not_record_is_refused_by_name(
    kind: str, every_engine_installed: None
) -> None:
    run = load(None, ["model.experts=4", "rollout.format=bf16", f"rollout.engine.type={kind}"])
    engine = build_engine(run.rollout.engine)
    assert "routing_replay" in (engine.capabilities.lacks(run.rollout, routes=True) or "")
    assert "routing_replay" not in (engine.capabilities.lacks(run.rollout) or "")


# The record


def with_routes(
    group: Group, dtype: Dtype = "uint8", layers: int = 2, tokens: int | None = None
) -> Group:
    prompt = group.ticket.prompt_ids.shape[0]
    rng = np.random.default_rng(0)

    def more(t):
        n = prompt + t.num_tokens - 1 if tokens is None else tokens
        return msgspec.structs.replace(
            t, routes=Array.of(rng.integers(0, 8, (n, layers, 2)), dtype)
        )

    return msgspec.structs.replace(group, trajectories=[more(t) for t in group.trajectories])


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_routes_go_through_message_and_log_bit_for_bit(
    dtype: Dtype, make_group, make_ticket, tmp_path: Path
) -> None:
    groups = [with_routes(make_group(make_ticket(0)), dtype), make_group(make_ticket(1))]
    assert [decode_group(encode(g)).validate() for g in groups] == groups
    log = TrajectoryLog(tmp_path)
    log.append(0, 0, groups)
    log.close()
    assert list(iter_log(tmp_path)) == [(0, groups)]


def tree(model: Decoder) -> tuple[list[int], Trajectory, list[Completion]]:
    """The record of an episode of five turns, in a tree, with what the engine drew of them: prompt, record, and
    turns. Each is asked for with all that it is drawn after, as an agent asks."""
    prompt, response, turns = [1, 2, 4], Response(), list[Completion]()

    def turn(context: list[int]) -> list[int]:
        ((done,),) = generate(publish(model), [context], samples=1)
        turns.append(done)
        record(response, prompt, context, done)
        return [*context, *done.response_ids.tolist()]

    first = turn(prompt)
    turn([*first, 9, 10])  # goes on on the first path
    second = turn([*first[:5], 11, 12])  # a branch within the first turn,
    turn([*second, 13])  # which goes on,
    turn([*second[:7], 14, 15, 16])  # and has a branch of its own
    return prompt, response.trajectory(0, Score(1.0, True), routes=True), turns


def test_a_tree_is_replayed_on_the_routes_of_all_its_paths() -> None:
    """Packed together and each path alone, the learner's log-probs are those with which each turn was drawn."""
    model = decoder()
    prompt, t, turns = tree(model)
    assert [(b.parent, b.routes is not None) for b in t.branches] == [(0, True), (1, True)]
    group = make_group(make_ticket(prompt_ids=Array.of(prompt, "int32"), group_size=1))
    group = replaced(group, trajectories=[t])
    sampling = replaced(group.ticket.sampling, max_tokens=1000)
    group = replaced(group, ticket=replaced(group.ticket, sampling=sampling)).validate()
    (read,) = groups_from_table(groups_to_table(0, 0, [group]))
    assert read == decode_group(encode(group)) == group
    fits(CONFIG, ROOM)(group)
    found = unlearnt_samples([group])
    for cuts in ([found], [[sample] for sample in found]):
        batches = [pack_batch(cut) for cut in cuts]
        logprobs = [token_logprobs(model, batch, 1.0, replay=True)[0] for batch in batches]
        mask = torch.cat([batch.mask for batch in batches])
        drawn = torch.cat([batch.behavior_logprobs for batch in batches])
        assert int(mask.sum()) == sum(len(turn.response_ids) for turn in turns)
        torch.testing.assert_close(torch.cat(logprobs)[mask], drawn[mask], atol=1e-4, rtol=0)
        for batch in batches:
            routing = routing_for(model, batch, replay=False)
            model(batch.token_ids, batch.layout, routing)
            assert routing is not None and batch.routes is not None
            own = torch.stack([routing.own[layer] for layer in (0, 1)], 1)
            assert torch.equal(own.sort(-1).values, batch.routes.sort(-1).values.long())
    before = t.branches[1].routes
    assert before is not None
    others = replaced(t.branches[1], routes=Array.of((before.numpy() + 1) % 8))
    changed = replaced(group, trajectories=[replaced(t, branches=(t.branches[0], others))])
    batch = pack_batch(unlearnt_samples([changed]))
    other, _ = token_logprobs(model, batch, 1.0, replay=True)
    gap = (other - torch.cat(logprobs)).abs()
    assert gap[batch.sequence_ids < 2].max() < 1e-4 < gap[batch.sequence_ids == 2].max()


@pytest.mark.parametrize(
    ("routes", "message"),
    [
        (np.zeros((2, 3, 2)), "not of the kind of the first path's"),
        (np.zeros((4, 2, 2)), "N < 4 tokens"),
        (np.full((2, 2, 2), 8), "more than 8 experts"),
    ],
)
def test_wrong_routes_of_a_branch_are_refused(make_group, routes, message: str) -> None:
    group = with_routes(make_group())
    first, *others = group.trajectories
    own: dict[str, Any] = {
        "response_ids": Array.of([5] * 4, "int32"),
        "spans": [VersionSpan(0, 4, "a")],
    }
    own |= {"behavior_logprobs": Array.of([-1.0] * 4, "float32"), "finish_reason": "stop"}
    own |= {"loss_mask": Array.of([1] * 4, "uint8"), "routes": Array.of(routes, "uint8")}
    tree = replaced(first, branches=(Branch(parent=0, at=1, **own),))
    with pytest.raises(RecordError, match=message):
        fits(replaced(CONFIG, vocab_size=100), ROOM)(
            replaced(group, trajectories=[tree, *others]).validate()
        )


@pytest.mark.parametrize(("dtype", "tokens"), [("int8", None), ("uint8", 99), ("uint8", 0)])
def test_routes_of_the_wrong_kind_or_length_are_refused(dtype, tokens, make_group) -> None:
    with pytest.raises(RecordError, match="trajectory 0: routes"):
        with_routes(make_group(), dtype, tokens=tokens).validate()


def test_a_group_that_does_not_fit_the_model_is_refused(make_group) -> None:
    check = fits(msgspec.structs.replace(CONFIG, vocab_size=100), ROOM)
    check(with_routes(make_group()))
    check(make_group())
    with pytest.raises(RecordError, match="another model"):
        check(with_routes(make_group(), layers=3))
    with pytest.raises(RecordError, match="token outside"):
        fits(CONFIG, ROOM)(make_group())
    few = msgspec.structs.replace(EXPERTS, count=3)
    with pytest.raises(RecordError, match="more than 3 experts"):
        fits(msgspec.structs.replace(CONFIG, vocab_size=100, experts=few), ROOM)(
            with_routes(make_group())
        )
    dense = msgspec.structs.replace(CONFIG, family="qwen3", vocab_size=100, experts=None)
    with pytest.raises(RecordError, match="another model"):
        fits(dense, ROOM)(with_routes(make_group()))


def test_a_group_longer_than_a_micro_batch_is_refused(make_group) -> None:
    """It once ended the learner, and every resume of it, since a group stays in Redis."""
    config, group = msgspec.structs.replace(CONFIG, vocab_size=100), make_group()
    prompt = group.ticket.prompt_ids.shape[0]
    longest = prompt + max(t.num_tokens for t in group.trajectories)
    fits(config, LearnerConfig(microbatch_tokens=longest))(group)
    with pytest.raises(RecordError, match=f"{longest} tokens with the prompt"):
        fits(config, LearnerConfig(microbatch_tokens=longest - 1))(group)
    shared = LearnerConfig(microbatch_tokens=1, backend=TorchBackend(context=2))
    with pytest.raises(RecordError, match=r"learner.microbatch_tokens = 1 · .*context = 2"):
        fits(config, shared)(group)
    with pytest.raises(RecordError, match=f"{longest} tokens with the prompt"):
        fits(msgspec.structs.replace(config, max_positions=longest - 1), ROOM)(group)


@pytest.mark.parametrize("asked", ["routing_replay=true", "router_aux_coef=0.1"])
def test_settings_about_experts_need_experts(asked: str) -> None:
    with pytest.raises(ConfigError, match="experts"):
        load(None, [f"learner.{asked}"])
    cfg = load(None, ["model.experts=4", f"learner.{asked}"]).learner
    check_experts(CONFIG, cfg)
    dense = msgspec.structs.replace(CONFIG, family="qwen3", experts=None)
    with pytest.raises(
        ConfigError, match=f"learner.{asked.partition('=')[0]}: qwen3 has no experts"
    ):
        check_experts(dense, cfg)


# The learner


def policy(model: Decoder, *settings: str) -> TorchPolicy:
    run = load(None, ["model.experts=8", "learner.uaq=1", *settings])
    return TorchPolicy(model, run.learner, temperature=1.0)


def quantized_rollouts(format: str = "int4", seed: int = 0) -> list[Sample]:
    return samples(generate(publish(decoder(seed), format), PROMPTS))


def test_replay_lowers_the_gap_of_quantized_rollouts() -> None:
    found = quantized_rollouts()
    kl = {}
    for replay in ("false", "true"):
        values = update_policy(policy(decoder(), f"learner.routing_replay={replay}"), found)
        kl[replay] = values["mismatch/kl_k3"]
        assert 0 < values["routing/disagreement"] < 0.9
    assert 0 < kl["true"] < kl["false"]


def test_disagreement_counts_token_layers_that_go_elsewhere() -> None:
    found = samples(generate(publish(decoder()), PROMPTS))
    assert update_policy(policy(decoder()), found)["routing/disagreement"] == 0
    changed, tokens = [], 0
    for s in found:
        assert s.trajectory.routes is not None
        routes = s.trajectory.routes.numpy().copy()
        last = routes[len(s.prompt_ids) - 1 :]
        tokens += len(last)
        last[:1, 0] = (
            last[:1, 0] + 1
        ) % 8  # the position that predicts the first token, in the first layer
        last[:, 1] = last[:, 1, ::-1]  # another order is the same choice
        t = msgspec.structs.replace(s.trajectory, routes=Array.of(routes))
        changed.append(replace(s, trajectory=t))
    batch = pack_batch(changed)
    model = decoder()
    routing = routing_for(model, batch, replay=False)
    assert routing is not None
    model(batch.token_ids, batch.layout, routing)
    value = routed(routing, batch, CONFIG).metrics["routing/disagreement"].value()
    # Prompts are computed once a group, with the routes of its first response.
    assert value == pytest.approx(len(PROMPTS) * 3 / (2 * tokens))


@pytest.mark.parametrize(
    "settings", [[], ["learner.router_aux_coef=0.5"], ["learner.entropy_coef=0.01"]]
)
def test_the_step_does_not_depend_on_how_it_is_cut(settings: list[str]) -> None:
    found = quantized_rollouts()
    results = []
    for tokens in (10_000, 40):
        model = decoder()
        one = policy(
            model, "learner.routing_replay=true", f"learner.microbatch_tokens={tokens}", *settings
        )
        values = update_policy(one, found)
        results.append((values, model.state_dict()))
    (a, first), (b, second) = results
    assert a["routing/disagreement"] == b["routing/disagreement"]
    assert a["train/grad_norm"] == pytest.approx(b["train/grad_norm"], rel=1e-4)
    assert a["train/loss"] == pytest.approx(b["train/loss"], abs=1e-6)
    for name, tensor in first.items():
        torch.testing.assert_close(tensor, second[name], atol=2e-5, rtol=0)


def test_gradients_reach_the_router_through_the_gates() -> None:
    model = decoder()
    one = policy(model, "learner.routing_replay=true", "learner.optimizer.warmup_steps=0")
    names = [f"model.layers.{layer}.mlp.gate.weight" for layer in (0, 2)]
    before = {name: model.get_parameter(name).clone() for name in names}
    update_policy(one, quantized_rollouts())
    assert not any(torch.equal(before[name], model.get_parameter(name)) for name in names)


def test_a_step_without_recorded_routes_takes_the_own_ones() -> None:
    found = quantized_rollouts()
    bare = [
        replace(s, trajectory=msgspec.structs.replace(s.trajectory, routes=None)) for s in found
    ]
    states = []
    for some, replay in ((bare, "true"), (found, "false")):
        model = decoder()
        values = update_policy(policy(model, f"learner.routing_replay={replay}"), some)
        assert ("routing/disagreement" in values) == (some is found)
        states.append(model.state_dict())
    assert all(torch.equal(t, states[1][name]) for name, t in states[0].items())


def test_a_rank_without_groups_counts_on_its_own_device() -> None:
    """Its zeros were on the processor, and the others waited for it on their GPUs for ever."""
    ranks = Mock(add=Mock(side_effect=lambda own: own))
    assert balance_weights([], CONFIG, ranks, "meta").device.type == "meta"


def test_the_balancing_loss_is_switchs() -> None:
    """transformers counts a token's K choices as K tokens, and takes all layers together."""
    config = msgspec.structs.replace(
        CONFIG, layers=1, experts=msgspec.structs.replace(EXPERTS, dense_layers=())
    )
    model = decoder(config=config)
    batch = pack_batch(samples(generate(publish(model), PROMPTS)))
    routing = routing_for(model, batch, replay=False)
    assert routing is not None
    model(batch.token_ids, batch.layout, routing)
    part = routed(routing, batch, config)
    ours = (balance_weights([part], config, ALONE, "cpu") * part.probs).sum()
    logits = routing.probs[0][batch.predict[batch.mask]].log()
    theirs = load_balancing_loss_func((logits,), num_experts=8, top_k=2)
    torch.testing.assert_close(ours, theirs / 2)
    assert ours >= 1


def test_the_balancing_loss_evens_out_the_load() -> None:
    found = quantized_rollouts("bf16")
    losses = []
    one = policy(
        decoder(),
        "learner.router_aux_coef=10",
        "learner.optimizer.lr=0.005",
        "learner.optimizer.warmup_steps=0",
    )
    for _ in range(6):
        losses.append(update_policy(one, found)["loss/router"])
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw8bit", "muon"])
def test_every_optimizer_trains_the_experts_as_matrices(optimizer: str) -> None:
    model = decoder()
    one = policy(model, f"learner.optimizer.type={optimizer}", "learner.optimizer.lr=0.01")
    before = {name: t.clone() for name, t in model.state_dict().items()}
    update_policy(one, quantized_rollouts())
    moved = {name for name, t in model.state_dict().items() if not torch.equal(t, before[name])}
    assert any("experts.0.down_proj" in name for name in moved)
    if optimizer == "muon":
        matrices = {id(p) for p in one.optimizer.param_groups[0]["params"]}
        names = {name for name, p in model.named_parameters() if id(p) in matrices}
        assert "model.layers.0.mlp.experts.7.up_proj.weight" in names
        assert not any(name.endswith("mlp.gate.weight") for name in names)


def test_a_restored_learner_of_experts_goes_on_bit_for_bit(tmp_path: Path) -> None:
    first, second = quantized_rollouts(), quantized_rollouts(seed=1)
    settings = ["learner.routing_replay=true", "learner.router_aux_coef=0.01"]
    whole = policy(decoder(), *settings)
    update_policy(whole, first)
    save_at(1, tmp_path, whole)
    again = policy(decoder(7), *settings)
    checkpoint.restore(tmp_path, again)
    assert update_policy(again, second) == update_policy(whole, second)
    theirs = again.model.state_dict()
    assert all(torch.equal(t, theirs[name]) for name, t in whole.model.state_dict().items())


@pytest.mark.parametrize(
    ("format", "config"), [("int8", CONFIG), ("fp8", CONFIG), ("int4", CONFIG), ("int4", SUNK)]
)
def test_an_aligned_forward_runs_the_published_experts(format: str, config: DecoderConfig) -> None:
    """QaRL: what is left of the gap is the engine's rounding, once routes are replayed."""
    weights = publish(decoder(config=config), format)
    found = samples(generate(weights, PROMPTS))
    run = load(
        None,
        ["model.experts=8", "learner.precision=qarl", f"rollout.format={format}", "learner.uaq=1"],
    )
    model = decoder(config=config)
    set_precision(model, run)
    logprobs, _ = token_logprobs(model, pack_batch(found), 1.0, replay=True)
    gaps = (logprobs - pack_batch(found).behavior_logprobs).abs()
    assert gaps.median() < 1e-5 and gaps.mean() < 0.03
    published = published_state(model, format)
    assert all(torch.equal(t, published[name]) for name, t in weights.tensors.items())


@torch.no_grad()
def test_sinks_and_biases_are_rounded_as_they_are_published() -> None:
    model = decoder(config=SUNK)
    for p in model.parameters():
        if p.dim() == 1:
            p.add_(torch.linspace(0.001, 0.002, len(p)))
    settings = ["rollout.format=int4", "rollout.unquantized=bf16", "learner.precision=qarl"]
    run = load(None, [*settings, "model.experts=8", "learner.uaq=1"])
    set_precision(model, run)
    published = published_state(model, "int4")
    rounded = rest_in_bf16(published, "int4")
    assert not torch.equal(rounded[SINKS].float(), published[SINKS])
    policy = engine_policy(SUNK, rounded, "int4")
    ids, layout = torch.arange(20), PackedLayout.of([9, 11])
    assert torch.equal(model(ids, layout), policy(ids, layout))
