"""Trees of samples, drawn by hypothesis, and the same samples as rows that share nothing."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from hypothesis import strategies as st

from areal_q.messages import Array, Trajectory, VersionSpan
from areal_q.models import PackedLayout
from areal_q.models.packed_layout import Segment
from learner.data.packing import Sample

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
        samples.append(
            Sample(ticket, path[:prompt], trajectory, advantage, lag, parent=parent, shared=shared)
        )
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
        t = msgspec.structs.replace(t, loss_mask=Array.of(mask, "uint8"))
        return replace(sample, ticket=1000 + number, trajectory=t, parent=None, shared=0)

    return [alone(number, sample) for number, sample in enumerate(samples)]


def gradients(loss: torch.Tensor, model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Returns the gradient of `loss` by parameter; zeros where it has none."""
    named = dict(model.named_parameters())
    found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {
        n: torch.zeros_like(p) if g is None else g
        for (n, p), g in zip(named.items(), found, strict=True)
    }
