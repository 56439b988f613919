"""Messages for more than one file of tests: what hypothesis draws, and a response that was begun."""

from typing import Any

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
    VersionSpan,
)

INT64 = st.integers(0, 2**63 - 1)
SECONDS = st.floats(0, 1e12)
PURPOSES = st.sampled_from(["train", "eval"])


@st.composite
def trajectories(draw, index: int) -> Trajectory:
    n = draw(st.integers(1, 6))
    cut = draw(st.integers(1, n))
    spans = [VersionSpan(draw(INT64), cut, draw(st.text(max_size=4)))]
    if cut < n:
        spans.append(VersionSpan(draw(INT64), n - cut, "b"))
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
            )
        )
        lengths.append(at + own.num_tokens)
    return replace(t, branches=tuple(branches))


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
