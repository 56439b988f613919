"""The Protocol of an environment, which turns a ticket into responses, and the Response that it fills.

Tokens that the model did not draw (a tool's result, a user's message) have loss mask 0 and log-prob 0 in the
response. Drawn tokens are never decoded and encoded again, which could change them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import msgspec
import numpy as np

from areal_q.config import Sampling
from areal_q.messages import (
    Array,
    Branch,
    FinishReason,
    PartialResponse,
    Ticket,
    Trajectory,
    TurnReward,
    VersionSpan,
    merge_spans,
)
from areal_q.messages.tokens import NOTHING, mask_array, mask_rows
from areal_q.tasks import Completed, Problem, Reward, Score, Tokenizer, judged_text
from rollout.engines.base import Completion


@dataclass
class Response:
    """Everything after a ticket's prompt, turn after turn. `ids`, `logprobs` (in nats) and `mask` have one
    value for each token."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    finish_reason: FinishReason = "length"
    """Why the last turn ended"""
    score: Score | None = None
    """Score from the agent that played the episode; None means that the task's reward function scores the
    text."""
    turns: int = 0
    """Number of turns that have ended"""
    pending: int = 0
    """Number of tokens drawn for a turn that was cut off, as its worker ended, and has to be continued"""
    ended: bool = False
    routes: np.ndarray | None = None
    """Experts of the tokens of prompt and response, turn after turn, as in Completion.routes; a branch's are of
    its own tokens"""
    sampling_mask: list[np.ndarray] = field(default_factory=list)
    """The ids that each token was drawn from, as in Completion.sampling_mask; NOTHING where that is not told"""
    prompt: list[int] | None = None
    """The tokens before the response, where an agent brought its own; None means the ticket's"""
    turn_rewards: dict[int, float] = field(default_factory=dict)
    """Rewards that turns were given, by the place of their last token among `ids`"""
    branches: list["Response"] = field(default_factory=list)
    """What else the episode drew, with own tokens only (episode_tree.py); all above is of the first path"""
    parent: int = 0
    """The path that a branch hangs off: 0 is the first, k that of branch k, counted from 1"""
    at: int = 0
    """Number of tokens of that path, those of the prompt included, that a branch shares"""

    def context(self, ticket: Ticket) -> list[int]:
        """Returns all tokens so far, those of the prompt included."""
        prompt = ticket.prompt_ids.numpy().tolist() if self.prompt is None else self.prompt
        return [*prompt, *self.ids]

    @property
    def paths(self) -> list["Response"]:
        """The first path, which has the branches, and these"""
        return [self, *self.branches]

    @property
    def drawn(self) -> int:
        """Number of tokens that the model drew, on all paths."""
        return sum(self.mask) + sum(branch.drawn for branch in self.branches)

    def text(self, tokenizer: Tokenizer, sampling: Sampling) -> str:
        """Returns the text that rewards judge."""
        return judged_text(self.ids, self.mask, tokenizer, sampling)

    def completed(self, tokenizer: Tokenizer, sampling: Sampling) -> Completed:
        """Returns the response as rewards judge it."""
        return Completed(self.text(tokenizer, sampling), self.drawn, self.ids, self.finish_reason)

    def add_drawn(self, completion: Completion) -> None:
        """Appends what the engine drew. A completion without a finish reason was cut off and has to be
        continued."""
        self.ids += completion.response_ids.tolist()
        self.logprobs += completion.logprobs.tolist()
        self.mask += [1] * len(completion.response_ids)
        self.sampling_mask += completion.sampling_mask or [NOTHING] * len(completion.response_ids)
        self.spans = merge_spans([*self.spans, *completion.spans])
        if completion.routes is not None:
            # Tokens keep the experts they had when later tokens were drawn after them, so earlier turns' stay.
            seen = completion.routes[:0] if self.routes is None else self.routes
            if seen.shape[1:] != completion.routes.shape[1:]:  # another worker's, of another model
                seen = completion.routes[:0]
            self.routes = np.concatenate((seen, completion.routes[len(seen) :]))
        if completion.finish_reason is None:
            self.pending += len(completion.response_ids)
        else:
            self.finish_reason = completion.finish_reason
            self.turns, self.pending = self.turns + 1, 0

    def add_given(self, ids: Sequence[int], version: VersionSpan) -> None:
        """Appends tokens that the model did not draw, such as a tool's result, stamped with `version`."""
        if not ids:
            return
        self.ids += ids
        self.logprobs += [0.0] * len(ids)
        self.mask += [0] * len(ids)
        self.sampling_mask += [NOTHING] * len(ids)
        span = VersionSpan(version.version, len(ids), version.digest)
        self.spans = merge_spans([*self.spans, span])

    def trajectory(self, index: int, score: Score, *, routes: bool = False) -> Trajectory:
        """Returns the record of the response, with the experts that the engine recorded if `routes` is True."""
        return Trajectory(
            index=index,
            response_ids=Array.of(self.ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
            reward=score.reward,
            reward_parts={**score.parts, "correct": float(score.correct)} if score.valid else {},
            reward_notes=score.notes,
            valid=score.valid,
            failure=score.failure,
            routes=_routes(self) if routes else None,
            sampling_mask=mask_array(self.sampling_mask),
            turn_rewards=_turn_rewards(self),
            branches=tuple(
                Branch(
                    parent=branch.parent,
                    at=branch.at,
                    response_ids=Array.of(branch.ids, "int32"),
                    behavior_logprobs=Array.of(branch.logprobs, "float32"),
                    loss_mask=Array.of(branch.mask, "uint8"),
                    spans=list(branch.spans),
                    finish_reason=branch.finish_reason,
                    turn_rewards=_turn_rewards(branch),
                    routes=_routes(branch) if routes else None,
                    sampling_mask=mask_array(branch.sampling_mask),
                )
                for branch in self.branches
            ),
        )

    def partial(self) -> PartialResponse:
        """Returns a record of the response so far, from which another worker can continue it. Branches are left
        out: only external agents make them, whose episodes begin again with another worker."""
        return PartialResponse(
            response_ids=Array.of(self.ids, "int32"),
            behavior_logprobs=Array.of(self.logprobs, "float32"),
            loss_mask=Array.of(self.mask, "uint8"),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
            turns=self.turns,
            pending=self.pending,
            ended=self.ended,
            routes=None if self.routes is None else Array.of(self.routes),
            sampling_mask=mask_array(self.sampling_mask),
        )

    @classmethod
    def of(cls, partial: PartialResponse) -> "Response":
        """Returns the response that another worker began."""
        return cls(
            ids=partial.response_ids.numpy().tolist(),
            logprobs=partial.behavior_logprobs.numpy().tolist(),
            mask=partial.loss_mask.numpy().tolist(),
            spans=list(partial.spans),
            finish_reason=partial.finish_reason,
            turns=partial.turns,
            pending=partial.pending,
            ended=partial.ended,
            routes=None if partial.routes is None else partial.routes.numpy(),
            sampling_mask=mask_rows(partial.sampling_mask, partial.response_ids.shape[0]),
        )


def _routes(path: Response) -> Array | None:
    return None if path.routes is None or not len(path.routes) else Array.of(path.routes)


def _turn_rewards(path: Response) -> tuple[TurnReward, ...]:
    return tuple(TurnReward(*found) for found in sorted(path.turn_rewards.items()))


async def scored(
    reward: Reward, ticket: Ticket, responses: Sequence[Response], tokenizer: Tokenizer
) -> list[Score]:
    """Returns the scores of the responses: their own, which agents and environments give, or the reward's."""
    open_ones = [r.completed(tokenizer, ticket.sampling) for r in responses if r.score is None]
    scores = iter(await reward(Problem.of_ticket(ticket), open_ones))
    return [r.score or next(scores) for r in responses]


def with_shared_prompt(ticket: Ticket, responses: list[Response]) -> tuple[Ticket, list[Response]]:
    """Returns both as a group holds them: before all responses stands one prompt, the longest beginning that
    their prompts have in common, and the rest of a prompt begins its response, with loss mask 0."""
    if all(response.prompt is None for response in responses):
        return ticket, responses
    prompts = [replace(r, ids=[]).context(ticket) for r in responses]
    differ = (i for i, ids in enumerate(zip(*prompts, strict=False)) if len({*ids}) > 1)
    shared = next(differ, min(map(len, prompts)))
    asked = msgspec.structs.replace(ticket, prompt_ids=Array.of(prompts[0][:shared], "int32"))
    pairs = zip(responses, prompts, strict=True)
    return asked, [_after(prompt[shared:], r) for r, prompt in pairs]


def _after(ids: list[int], response: Response) -> Response:
    """Returns the response with `ids` before it, of the version that drew its first token."""
    moved = {len(ids) + place: reward for place, reward in response.turn_rewards.items()}
    empty: dict[str, Any] = {
        name: [] for name in ("ids", "logprobs", "mask", "spans", "sampling_mask")
    }
    out = replace(response, **empty, prompt=None, turn_rewards=moved)
    out.add_given(ids, response.spans[0])
    out.ids += response.ids
    out.logprobs += response.logprobs
    out.mask += response.mask
    out.sampling_mask += response.sampling_mask
    out.spans = merge_spans([*out.spans, *response.spans])
    return out


class Environment(Protocol):
    """Turns a ticket into responses. To add one: a Struct in areal_q/config/environments.py, a class in this
    folder that inherits from this one, and a line in registry.py."""

    failure: str = ""
    """How the newest episode failed; "" while none did"""
    at_endpoint: bool = False
    """True if turns are requested at the worker's endpoint"""
    plays_itself: bool = False
    """True if it starts by itself who requests them"""

    @property
    def open(self) -> int:
        """Number of episodes that an agent plays now."""
        return 0

    @property
    def unfinished(self) -> int:
        """Number of episodes that have not ended, whether or not an agent plays them."""
        return 0

    async def start(self) -> None:
        """Starts what it needs before the first ticket. Raises TaskError for code that cannot be used."""

    async def close(self) -> None:
        """Ends what `start` has started."""

    async def __call__(self, ticket: Ticket, responses: list[Response]) -> None:
        """Completes each of the ticket's `group_size` responses in place; some may have been begun by another
        worker. When cancelled, it cancels its requests to the engine, and `responses` keep everything that was
        drawn."""
        ...
