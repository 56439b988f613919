"""Training on truncated sampling: each token is recorded with the ids that it was drawn from, and scored among
them. The oracle is the whole distribution with -inf elsewhere."""

import dataclasses
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from helpers.engines import ask, generate
from helpers.fixture_types import MakeRun
from helpers.kinds import write_foreign
from helpers.policies import initial_model
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

from areal_q.config import HfEngine, Run, Sampling
from areal_q.errors import ConfigError, RecordError
from areal_q.messages import Array, Branch, Group
from areal_q.messages.codec import decode_group, decode_partial, encode, encode_group
from areal_q.messages.trajectories import PartialGroup
from areal_q.models import Decoder
from areal_q.models.logprobs import masked_logprobs
from areal_q.tasks import Score
from bench.records import make_group, make_ticket, make_trajectory
from buffer.logs.trajectory_schema import groups_from_table, groups_to_table
from learner.backends.precision import set_precision
from learner.backends.single_device import token_logprobs
from learner.data.packing import Sample, pack_samples
from learner.data.validation import fits
from learner.publishing.version_builder import VersionBuilder
from rollout.engines.base import Capabilities, Completion
from rollout.environments.base import Response, with_shared_prompt

TRUNCATED = {"temperature": 0.8, "top_p": 0.9, "top_k": 8, "max_tokens": 8}
PROMPTS = [3, 1, 4, 1, 5], [3, 1, 4, 1, 9]


def scored_densely(
    logits: Tensor, targets: Tensor, kept: Tensor, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of the whole distribution, -inf where nothing was kept."""
    inside = torch.zeros(len(logits), logits.shape[1] + 1, dtype=torch.bool)
    inside = inside.scatter_(1, kept % (logits.shape[1] + 1), True)[:, :-1]
    logp = (logits / temperature).masked_fill(~inside, -torch.inf).log_softmax(-1)
    entropy = -torch.where(inside, logp.exp() * logp.masked_fill(~inside, 0.0), 0.0).sum(-1)
    return logp.gather(1, targets[:, None]).squeeze(1), entropy


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 12), st.sampled_from([0.5, 1.0, 2]))
def test_log_probs_among_ids_are_those_with_the_rest_left_out(
    seed: int, tokens: int, most: int, temperature: float
) -> None:
    rng = np.random.default_rng(seed)
    rows = [np.sort(rng.permutation(12)[: rng.integers(1, most + 1)]) for _ in range(tokens)]
    targets = torch.tensor([int(rng.choice(row)) for row in rows])
    kept = torch.tensor([[*row, *[-1] * (most - len(row))] for row in rows])
    torch.manual_seed(seed)
    given_ones = torch.randn(tokens, 5).double(), torch.randn(12, 5).double()
    found = []
    for dense in (False, True):
        hidden, weight = (x.clone().requires_grad_() for x in given_ones)
        if dense:
            logprobs, entropy = scored_densely(hidden @ weight.t(), targets, kept, temperature)
        else:
            with mock.patch("areal_q.models.logprobs.BLOCK", 64):  # several blocks
                logprobs, entropy = masked_logprobs(
                    hidden, weight, targets, kept, temperature, True
                )
        (logprobs.sum() + 0.3 * (entropy**2).sum()).backward()
        found.append((logprobs, entropy, hidden.grad, weight.grad))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9)


def test_hidden_states_in_bfloat16_are_summed_in_float32() -> None:
    hidden = torch.randn(6, 32).bfloat16().requires_grad_()
    weight, targets = torch.randn(20, 32), torch.arange(6)
    mask = torch.stack((targets, targets + 7), 1)
    logprobs, entropy = masked_logprobs(hidden, weight, targets, mask, 1.0)
    logits = (hidden.float() @ weight.t()).gather(1, mask)
    torch.testing.assert_close(logprobs, logits.log_softmax(-1)[:, 0], atol=1e-5, rtol=1e-5)
    assert logprobs.dtype == torch.float32 and not entropy.requires_grad
    logprobs.sum().backward()
    assert hidden.grad is not None and hidden.grad.dtype == torch.bfloat16


def drawn(run: Run, model: Decoder) -> list[Completion]:
    """One response to each prompt."""
    asked = [replace(ask(prompt, 1, 7, **TRUNCATED), masked=True) for prompt in PROMPTS]
    weights = VersionBuilder(run).build(model, 0)
    return [one for (one,) in generate(weights, *asked, config=run.rollout.engine)]


def group_of(completions: list[Completion]) -> Group:
    """What a worker makes of completions whose prompts differ at the end, where a token was not drawn."""
    asked = make_ticket(group_size=len(completions), sampling=Sampling(**TRUNCATED))
    responses = [Response(prompt=prompt) for prompt in PROMPTS]
    for response, completion in zip(responses, completions, strict=True):
        response.add_drawn(completion)
    ticket, responses = with_shared_prompt(asked, responses)
    score = Score(1.0, True)
    trajectories = [r.trajectory(i, score) for i, r in enumerate(responses)]
    return make_group(ticket, trajectories=trajectories)


def samples_of(group: Group) -> list[Sample]:
    prompt = group.ticket.prompt_ids.numpy()
    return [Sample(0, prompt, t, 1.0, np.zeros(t.num_tokens, np.int64)) for t in group.trajectories]


WAITS = pytest.mark.timeout(600), pytest.mark.filterwarnings("ignore")
SERVED = [
    pytest.param("small, by vllm", marks=[pytest.mark.vllm, *WAITS]),
    pytest.param("small, by sglang", marks=[pytest.mark.sglang, *WAITS]),
]


@pytest.mark.parametrize("kind", ["small", "qwen2_moe, no biases", *SERVED])
def test_the_learner_scores_by_the_distribution_that_drew(
    make_run: MakeRun, tmp_path: Path, kind: str
) -> None:
    """On the same numbers, at lag 0: every ratio is 1; scored by the whole distribution it is not."""
    settings = ["rollout.format=bf16", "learner.precision=qarl", "learner.uaq=1"]
    if engine := kind.partition(", by ")[2]:
        pytest.importorskip(engine, reason=f"{engine} is not installed: make test-{engine}")
        shape = ["model.width=64", "model.heads=2", "model.kv_heads=1"]
        settings += [f"rollout.engine.type={engine}", *shape]
    elif kind != "small":
        write_foreign(tmp_path / "model", kind)
        settings.append(f"model={{type='pretrained', path='{tmp_path / 'model'}'}}")
    run = make_run(*settings)
    model = initial_model(run)
    set_precision(model, run)
    completions = drawn(run, model)
    assert any(len(ids) > 1 for c in completions for ids in c.sampling_mask or ())
    batch = pack_samples(samples_of(group_of(completions).validate()))
    found, _ = token_logprobs(model, batch, 0.8)
    wanted = batch.behavior_logprobs[batch.mask]
    # A processor that multiplies bfloat16 rounds the engine's products otherwise.
    torch.testing.assert_close(found[batch.mask], wanted, atol=1e-4, rtol=0)
    whole, _ = token_logprobs(model, dataclasses.replace(batch, sampling_mask=None), 0.8)
    assert not torch.allclose(whole[batch.mask], wanted, atol=1e-2)


def test_who_is_not_told_draws_beside_who_is(make_run: MakeRun) -> None:
    """The same tokens and log-probs, together or each alone, and a mask for one of them."""
    weights = VersionBuilder(make_run()).build(initial_model(make_run()), 0)
    told, untold = (replace(ask(PROMPTS[0], 3, 7, **TRUNCATED), masked=on) for on in (True, False))
    together = generate(weights, told, untold)
    for mine, asked in zip(together, (told, untold), strict=True):
        (alone,) = generate(weights, asked)
        for one, other in zip(mine, alone, strict=True):
            assert one.response_ids.tolist() == other.response_ids.tolist()
            np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert all(one.sampling_mask for one in together[0])
    assert all(one.sampling_mask is None for one in together[1])
    assert together[0][0].response_ids.tolist() == together[1][0].response_ids.tolist()


@pytest.mark.parametrize("odd", [{"top_k": 0}, {"top_k": 513}, {"temperature": 0.0}])
def test_a_mask_without_bounds_is_refused_by_the_engine(make_run: MakeRun, odd: Any) -> None:
    asked = replace(ask(PROMPTS[0], 1, 7, **{**TRUNCATED, **odd}), masked=True)
    with pytest.raises(RecordError, match="a sampling mask needs a temperature"):
        generate(VersionBuilder(make_run()).build(initial_model(make_run()), 0), asked)


def test_what_a_token_was_drawn_from_goes_through_every_record(make_run: MakeRun) -> None:
    run = make_run("rollout.format=int8")
    group = group_of(drawn(run, initial_model(run))).validate()
    first = group.trajectories[0]
    assert first.sampling_mask and first.loss_mask.numpy()[0] == 0
    assert (first.sampling_mask.numpy()[0] == -1).all(), (
        "a token of the environment's was not drawn"
    )
    assert decode_group(encode(group)) == group
    assert decode_group(b"".join(encode_group(group))) == group
    branch = Branch(
        parent=0, at=6, response_ids=Array.of([4, 9], "int32"), finish_reason="stop",
        behavior_logprobs=Array.of([-1, -1], "float32"), loss_mask=Array.of([0, 1], "uint8"),
        spans=first.spans[:1] and [replace(first.spans[0], tokens=2)],
        sampling_mask=Array.of([[-1, -1], [3, 9]], "int32"),
    )  # fmt: skip
    ticket = replace(group.ticket, sampling=replace(group.ticket.sampling, max_tokens=99))
    tree = replace(first, branches=(branch,))
    forked = replace(group, ticket=ticket, trajectories=[tree, *group.trajectories[1:]]).validate()
    plain = make_group()
    table = groups_to_table(0, 0, [forked, plain, group])
    assert groups_from_table(table) == [forked, plain, group]
    for odd in (
        replace(branch, sampling_mask=None),
        replace(branch, loss_mask=Array.of([1], "uint8")),
    ):
        with pytest.raises(RecordError, match="trajectory 0, branch 1"):
            replace(
                forked, trajectories=[replace(first, branches=(odd,)), *group.trajectories[1:]]
            ).validate()
    response = Response.of(Response().partial())
    response.add_drawn(drawn(run, initial_model(run))[0])
    record = PartialGroup(ticket=0, responses=[response.partial()])
    (again,) = decode_partial(encode(record)).responses
    assert Response.of(again.validate(group.ticket)).partial() == response.partial()


ROWS = [[1, 4, 6], [2, 9, -1]]
WRONG = {
    "not told": (None, "it is not told what its tokens were drawn from"),
    "another dtype": (np.array(ROWS, np.int64), "is not int32"),
    "a row too few": (np.array(ROWS[:1], np.int32), r"is not int32 \[2, 1 to 512\]"),
    "too wide": (np.full((2, 513), 4, np.int32), "1 to 512"),
    "not its own": (np.array([[1, 5, 6], ROWS[1]], np.int32), "token 0: sampling_mask has not"),
    "twice": (np.array([ROWS[0], [9, 9, -1]], np.int32), "token 1: sampling_mask has not"),
    "a gap": (np.array([[4, -1, 6], ROWS[1]], np.int32), "token 0: sampling_mask has not"),
    "negative": (np.array([[-5, 4, 6], ROWS[1]], np.int32), "token 0: sampling_mask has not"),
}


def hand_made(kept: np.ndarray | None) -> Group:
    t = make_trajectory(
        0, [4, 9], [0.0, 0.0], sampling_mask=None if kept is None else Array.of(kept)
    )
    ticket = make_ticket(0, group_size=1, sampling=Sampling(**TRUNCATED))
    return make_group(ticket, trajectories=[t])


@pytest.mark.parametrize("wrong", WRONG)
def test_forged_kept_ids_are_refused(wrong: str) -> None:
    kept, reason = WRONG[wrong]
    with pytest.raises(RecordError, match=reason):
        hand_made(kept).validate()
    hand_made(np.array(ROWS, np.int32)).validate()


def test_masks_that_nobody_asked_for_or_of_odd_ids_are_refused(
    make_run: MakeRun,
) -> None:
    group = hand_made(np.array(ROWS, np.int32))
    whole = replace(group.ticket, sampling=Sampling())
    with pytest.raises(RecordError, match="of a truncated distribution"):
        replace(group, ticket=whole).validate()
    run = make_run()
    check = fits(initial_model(run).config, run.learner)
    check(group)
    with pytest.raises(RecordError, match="a token outside of"):
        check(hand_made(np.array([[1, 4, 2**31 - 1], ROWS[1]], np.int32)))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (["rollout.sampling.top_p=0.9"], "top_k must be from 1 to 512"),
        (["rollout.sampling.min_p=0.1"], "top_k must be from 1 to 512"),
        (["rollout.sampling.top_k=513"], "top_k must be from 1 to 512"),
        (
            ["rollout.sampling.top_k=8", "learner.backend.type=megatron"],
            "neither Megatron nor learner.backend.context",
        ),
        (["rollout.sampling.top_k=8", "learner.backend.context=2"], "neither Megatron nor"),
        (
            ["rollout.sampling.top_k=8", "learner.teacher={type='model', path='x'}"],
            "learner.teacher scores",
        ),
    ],
)
def test_truncation_that_cannot_be_learnt_from_is_refused(
    make_run: MakeRun, settings: list[str], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        make_run(*settings)


def test_an_engine_that_does_not_tell_is_refused(make_run: MakeRun) -> None:
    asked = make_run("rollout.sampling={top_p=0.9, top_k=20}").rollout
    other = Capabilities(formats=frozenset({asked.format}), kv_on_update=frozenset({"keep"}))
    assert "what tokens were drawn from" in (other.lacks(replace(asked, engine=HfEngine())) or "")
