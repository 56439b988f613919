"""What more than one file of tests draws by hypothesis: messages, begun responses, trees of samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.config import Sampling
from areal_q.messages import (
    Array,
    Branch,
    Group,
    PartialResponse,
    Ticket,
    Trajectory,
    TurnReward,
    VersionSpan,
)
from areal_q.messages.tokens import NOTHING, mask_array
from areal_q.models import PackedLayout
from areal_q.models.packed_layout import Segment
from learner.data.packing import Sample

INT64 = st.integers(0, 2**63 - 1)
VERSIONS = st.integers(0, 2**62)
"""So that a lag, which may be counted over an older version, is an int64 too"""
SECONDS = st.floats(0, 1e12)
PURPOSES = st.sampled_from(["train", "eval"])


@st.composite
def trajectories(draw, index: int) -> Trajectory:
    n = draw(st.integers(1, 6))
    cut = draw(st.integers(1, n))
    spans = [VersionSpan(draw(VERSIONS), cut, draw(st.text(max_size=4)))]
    if cut < n:
        spans.append(VersionSpan(draw(VERSIONS), n - cut, "b"))
    logprobs = st.floats(-(2.0**100), 0.0, width=32)
    ids = st.integers(0, 2**31 - 1)
    return Trajectory(
        index=index,
        response_ids=Array.of(draw(st.lists(ids, min_size=n, max_size=n)), "int32"),
        behavior_logprobs=Array.of(draw(st.lists(logprobs, min_size=n, max_size=n)), "float32"),
        loss_mask=Array.of(draw(st.lists(st.integers(0, 1), min_size=n, max_size=n)), "uint8"),
        spans=spans,
        finish_reason=draw(st.sampled_from(["stop", "length"])),
        reward=draw(st.floats(-1e15, 1e15)),
        reward_parts=draw(st.dictionaries(st.text(max_size=5), st.floats(-9, 9), max_size=3)),
        reward_notes=draw(st.dictionaries(st.text(max_size=5), st.text(), max_size=2)),
    )


@st.composite
def branched(draw, prompt: int, t: Trajectory) -> Trajectory:
    """`t` after a prompt of so many tokens, with up to three branches anywhere on its paths."""
    lengths, branches = [prompt + t.num_tokens], list[Branch]()
    for number in range(draw(st.integers(0, 3))):
        own, parent = draw(trajectories(0)), draw(st.integers(0, number))
        own = draw(rewarded(own))
        mask = [*own.loss_mask.numpy().tolist()[:-1], 1]
        at = draw(st.integers(1, lengths[parent]))
        branches.append(
            Branch(
                parent=parent,
                at=at,
                response_ids=own.response_ids,
                behavior_logprobs=own.behavior_logprobs,
                loss_mask=Array.of(mask, "uint8"),
                spans=own.spans,
                finish_reason=own.finish_reason,
                turn_rewards=own.turn_rewards,
            )
        )
        lengths.append(at + own.num_tokens)
    return replace(draw(rewarded(t)), branches=tuple(branches))


@st.composite
def rewarded(draw, t: Trajectory) -> Trajectory:
    """`t` with rewards of turns that end at some of its drawn tokens."""
    drawn = np.flatnonzero(t.loss_mask.numpy()).tolist()
    some = sorted(draw(st.sets(st.sampled_from(drawn)))) if drawn else []
    rewards = st.integers(-3, 3).map(float)
    return replace(t, turn_rewards=tuple(TurnReward(place, draw(rewards)) for place in some))


@st.composite
def truncated(draw, path: Any) -> Any:
    """The trajectory or branch `path` with what its drawn tokens were drawn from."""
    others = st.sets(st.integers(0, 2**31 - 1), max_size=3)
    ids, mask = path.response_ids.numpy().tolist(), path.loss_mask.numpy().tolist()
    rows = [
        np.array(sorted({i, *draw(others)}), np.int32) if drawn else NOTHING
        for i, drawn in zip(ids, mask, strict=True)
    ]
    return replace(path, sampling_mask=mask_array(rows))


@st.composite
def groups(draw, numbers=INT64, purposes=PURPOSES, branches: bool = False) -> Group:
    """Groups of any valid content, their tickets of these numbers and purposes."""
    size = draw(st.integers(1, 3))
    ticket = Ticket(
        run=draw(st.text(max_size=5)),
        number=draw(numbers),
        purpose=draw(purposes),
        step=draw(INT64),
        prompt=draw(st.text(max_size=9)),
        answer=draw(st.text(max_size=9)),
        prompt_ids=Array.of(draw(st.lists(st.integers(0, 999), min_size=1, max_size=5)), "int32"),
        group_size=size,
        sampling=Sampling(
            temperature=draw(st.floats(0, 2)),
            top_p=0.9,
            top_k=draw(st.integers(0, 50)),
            min_p=draw(st.sampled_from([0.0, 0.05])),
            stop=draw(st.sampled_from([(), ("\n\n", (5, 6)), ("’",)])),
        ),
        seed=draw(INT64),
        messages=tuple(
            draw(st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()})))
        ),
        columns=draw(st.sampled_from(["", '{"level": 3}'])),
        source=draw(st.sampled_from(["", "math"])),
        problem=draw(st.integers(-1, 9)),
        why=draw(st.sampled_from(["", "hard: pass rate 0.00 after 1 group"])),
    )
    found = [draw(trajectories(i)) for i in range(size)]
    if branches:
        found = [draw(branched(ticket.prompt_ids.shape[0], t)) for t in found]
    if ticket.masked:
        found = [
            replace(draw(truncated(t)), branches=tuple(draw(truncated(b)) for b in t.branches))
            for t in found
        ]
    return Group(
        ticket=ticket,
        worker=draw(st.text(max_size=5)),
        engine="scripted",
        weight_format=draw(st.sampled_from(["bf16", "int8"])),
        trajectories=found,
        started_s=draw(SECONDS),
        finished_s=draw(SECONDS),
    )


def begun(ids: list[int], **changes: Any) -> PartialResponse:
    """The beginning of a response with the tokens `ids`, all drawn by version 0, with `changes`."""
    tokens = len(ids)
    sound = PartialResponse(
        response_ids=Array.of(ids, "int32"),
        behavior_logprobs=Array.of([-1.0] * tokens, "float32"),
        loss_mask=Array.of([1] * tokens, "uint8"),
        spans=[VersionSpan(0, tokens, "a")],
        finish_reason="length",
        turns=0,
        pending=tokens,
        ended=False,
    )
    return replace(sound, **changes)


NODES = st.tuples(*[st.integers(0, 99)] * 3, st.integers(1, 6))
"""(off which sample it branches, at which of its tokens, where its prompt ends, number of its own tokens)"""
FORESTS = st.lists(NODES, min_size=1, max_size=9)
DEEP = [
    (0, 0, 2, 5),  # a prompt of three tokens
    (0, 1, 1, 4),  # branches inside the prompt
    (0, 5, 2, 3),  # and after the last token;
    (2, 7, 8, 2),  # there off the last but one, with a prompt beyond the tokens that it shares;
    (3, 8, 3, 4),  # from there two at one token,
    (3, 8, 3, 1),  # of which one has a single token
    (5, 9, 0, 3),  # and a child after it
]


def grouped(groups: Sequence[tuple[int, Sequence[int]]], device: str = "cpu") -> PackedLayout:
    """Returns the layout of groups of a prompt's length and its responses'."""
    segments: list[Segment] = []
    for prompt, (first, *others) in groups:
        root = len(segments)
        segments += [Segment(prompt + first), *(Segment(n, root, prompt) for n in others)]
    return PackedLayout.of_forest(segments, device)


def forest(nodes: Sequence[tuple[int, int, int, int]], seed: int, ticket: int = 0) -> list[Sample]:
    """Returns the samples of `nodes`, of one ticket. Each token has a route, to 2 of 5 experts in 2 layers,
    which is the same in all samples that share it."""
    rng = np.random.default_rng(seed)
    samples: list[Sample] = []
    for index, (which, where, end, own) in enumerate(nodes):
        root = not samples or which == 99
        parent = None if root else which % len(samples)
        path = rng.integers(0, 13, own + root).astype(np.int32)  # a root has a prompt too
        shared = 0
        if parent is not None:
            shared = 1 + where % samples[parent].num_tokens
            path = np.concatenate((samples[parent].path[:shared], path))
        prompt = 1 + end % (len(path) - 1)
        count = len(path) - prompt
        trajectory = Trajectory(
            index=index,
            response_ids=Array.of(path[prompt:]),
            behavior_logprobs=Array.of(-3 * rng.random(count), "float32"),
            loss_mask=Array.of(rng.random(count) < 0.9, "uint8"),
            spans=[VersionSpan(0, count, "a0")],
            finish_reason="stop",
            reward=0.0,
            routes=Array.of(routes_of(path[:-1]), "uint8"),
        )
        advantage, lag = float(rng.normal()), rng.integers(0, 3, count)
        samples.append(Sample(ticket, path[:prompt], trajectory, advantage, lag, shared=shared))
    return samples


def routes_of(path: np.ndarray) -> np.ndarray:
    """Returns routes, int64 [len(path), 2, 2], each of which follows from the tokens up to it alone."""
    rngs = (np.random.default_rng(path[: n + 1]) for n in range(len(path)))
    return np.array([rng.random((2, 5)).argsort(-1)[:, :2] for rng in rngs]).reshape(-1, 2, 2)


def unshared(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the same samples as groups of one each; what is another's to learn does not count."""

    def alone(number: int, sample: Sample) -> Sample:
        t = sample.trajectory
        mask = t.loss_mask.numpy() * (
            np.arange(t.num_tokens) + len(sample.prompt_ids) >= sample.shared
        )
        t = replace(t, loss_mask=Array.of(mask, "uint8"))
        return dataclasses.replace(sample, ticket=1000 + number, trajectory=t, shared=0)

    return [alone(number, sample) for number, sample in enumerate(samples)]


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradient of `loss` by parameter; zeros where it has none."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(named.items(), found, strict=True)
    }
