"""The tree of an episode, of random requests: each drawn token is there once, after what was before it."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from helpers.strategies import INT64
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q.messages import VersionSpan, parts
from areal_q.messages.tokens import common
from areal_q.tasks import Score
from rollout.engines.base import Completion
from rollout.environments.base import Response
from rollout.environments.episode_tree import path_of, record

PROMPT = [1, 2, 3]
TOKENS = st.lists(st.integers(1, 3), max_size=4)
"""So few different ones that beginnings are often the same by chance"""


@dataclass
class Request:
    """What is kept of an earlier request's path, as a share, what then is said, and what is drawn."""

    of: int
    kept: float
    said: list[int]
    drawn: list[int]


REQUESTS = st.builds(
    Request,
    of=st.integers(0, 20),
    kept=st.sampled_from([0.0, 0.3, 0.6, 1.0, 1.0]),
    said=TOKENS,
    drawn=TOKENS.filter(len),
)


@dataclass
class Client:
    """All that was asked and drawn, as prompt and drawn tokens."""

    told: list[tuple[list[int], list[int]]] = field(default_factory=list)

    def context(self, request: Request) -> list[int]:
        """What the request is drawn after: it begins with the ticket's first token, as all do."""
        if not self.told:
            return [*PROMPT[: max(1, round(request.kept * len(PROMPT)))], *request.said]
        prompt, drawn = self.told[request.of % len(self.told)]
        whole = [*prompt, *drawn]
        return [*whole[: max(1, round(request.kept * len(whole)))], *request.said]


@given(TOKENS, TOKENS)
def test_the_common_beginning_is_the_longest(a: list[int], b: list[int]):
    length = common(a, b)
    assert (a[:length] == b[:length] and a[: length + 1] != b[: length + 1]) or a == b


@settings(max_examples=200, deadline=None)
@given(st.lists(REQUESTS, min_size=1, max_size=9), INT64)
def test_each_drawn_token_is_recorded_once_on_its_path(requests: list[Request], version: int):
    client, response, ends = Client(), Response(), list[tuple[int, int]]()
    for number, request in enumerate(requests):
        context = client.context(request)
        own_prompt = context if context[: len(PROMPT)] != PROMPT else PROMPT
        shared = (common(context, [*p, *d]) for p, d in client.told)
        longest, before = max(shared, default=len(own_prompt)), tokens(response)
        # Each turn has a log-prob of its own, by which its tokens are found in the record.
        state = record(response, PROMPT, context, completion(request.drawn, number, version))
        client.told.append((context, request.drawn))
        ends.append((state.path, state.length))
        assert tokens(response) - before == len(context) - longest + len(request.drawn)
        path = path_of(response, PROMPT, state.path)
        assert path[: state.length] == path == [*context, *request.drawn]
    assert response.drawn == sum(len(drawn) for _, drawn in client.told)
    record_of = response.trajectory(0, Score(1.0, True))
    prompt_ids = np.array(PROMPT if response.prompt is None else response.prompt, np.int32)
    found = dict[int, tuple[int, list[int], list[int]]]()
    for number, (context, own) in enumerate(parts(prompt_ids, record_of)):
        path = [*context.tolist(), *own.response_ids.numpy().tolist()]
        mask, turns = own.loss_mask.numpy(), -own.behavior_logprobs.numpy() - 1
        assert sum(span.tokens for span in own.spans) == own.num_tokens
        for turn in np.unique(turns[mask == 1]).astype(int).tolist():
            places = (len(context) + np.flatnonzero((turns == turn) & (mask == 1))).tolist()
            assert turn not in found, "a turn is on one path"
            found[turn] = number, path, places
    for turn, (prompt, drawn) in enumerate(client.told):
        number, path, places = found.pop(turn)
        assert places == [*range(len(prompt), len(prompt) + len(drawn))]
        assert path[: places[-1] + 1] == [*prompt, *drawn]
        assert (number, places[-1] + 1) == ends[turn], "a state finds its turn again"
    assert not found


def tokens(response: Response) -> int:
    return sum(len(path.ids) for path in (response, *response.branches))


def completion(drawn: list[int], turn: int, version: int) -> Any:
    return Completion(
        response_ids=np.array(drawn, np.int32),
        logprobs=np.full(len(drawn), -1.0 - turn, np.float32),
        spans=[VersionSpan(version, len(drawn), "ab")],
        finish_reason="stop",
    )
