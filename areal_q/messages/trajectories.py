"""Tickets, groups of trajectories, and the heartbeat: what goes through Redis and the log.

Notation: P prompt tokens, T response tokens, G responses to one prompt.
"""

from typing import Annotated, Literal

import msgspec
import numpy as np

from areal_q.config import Sampling
from areal_q.errors import RecordError
from areal_q.messages.branches import Branch, validate_branches
from areal_q.messages.tokens import (
    LARGEST_LOGPROB,
    LARGEST_REWARD,
    Array,
    FinishReason,
    TurnReward,
    VersionSpan,
    validate_sampling_mask,
    validate_tokens,
    validate_turn_rewards,
)

CHECKED_TOKENS = 16384
"""Tokens that are checked with one call. A call costs more than the tokens of a short response do, but to join
long ones takes fresh memory each time, at five times the cost of the check."""

LONGEST_NOTE = 16384
"""Characters of a text that a reward gives for the log"""

MESSAGE_SCHEMA = 1
FailureCause = Literal["exception", "timeout", "killed", "unavailable", "environment"]
"""Why a response could not be scored. The reward raised; it took longer than `reward.timeout_s`; its process
ended or ran out of memory; what it needs, such as a judge, did not answer; the episode's environment failed."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number that the logs' int64 columns hold"""
Schema = Annotated[int, msgspec.Meta(ge=0, le=2**15)]
Bounded = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
Finite = Annotated[float, msgspec.Meta(ge=-1e18, le=1e18)]
LONGEST_NAME = 256
Name = Annotated[str, msgspec.Meta(max_length=LONGEST_NAME)]
Sentence = Annotated[str, msgspec.Meta(max_length=2 * LONGEST_NAME)]
GroupSize = Annotated[int, msgspec.Meta(ge=1, le=100_000)]


class Ticket(msgspec.Struct, frozen=True, kw_only=True):
    """One admitted prompt: the right, and the duty, to generate one group.

    Example: number 130 of a run with 64 groups a step and max_lag 2 is admitted at version 0
    (130 < (0 + 2 + 1) · 64) and will be used by step 2 or, if stragglers pass it, soon after.
    """

    schema: Schema = MESSAGE_SCHEMA
    run: str
    number: Natural
    """Position in the run's sequence of prompts; evaluation tickets count for themselves."""
    purpose: Literal["train", "eval"] = "train"
    step: Natural
    """The learner's version when it admitted the ticket."""
    prompt: str
    answer: str
    """What the reward compares with; never shown to the model."""
    prompt_ids: Array
    """int32 [P]."""
    group_size: GroupSize
    sampling: Sampling
    seed: Natural
    """Response i of the group draws with `seed + i`."""
    run_id: str = ""
    """Id of the run that admitted it, which its name alone does not tell; "" before there were ids."""
    messages: tuple[dict[str, str], ...] = ()
    """The prompt as a conversation; empty if it is one text."""
    columns: str = ""
    """All that the data have in the problem's row, as a JSON object, for a reward of the user's own; "" if the
    reward is a built-in one."""
    source: str = ""
    """The mixture's task, or evaluation set, whose reward judges the responses; "" is the run's one task."""
    problem: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """The problem's place among those of its task, where the order remembers; -1 where the number says it."""
    why: str = ""
    """Why the order chose it then, in words; "" where the number says it."""

    @property
    def masked(self) -> bool:
        """True if it is recorded what each token was drawn from: in training, of a truncated distribution."""
        return self.purpose == "train" and self.sampling.truncated

    def validate(self) -> "Ticket":
        """This ticket, if its prompt keeps the contract. Raises RecordError."""
        prompt = self.prompt_ids
        if prompt.dtype != "int32" or len(prompt.shape) != 1 or prompt.numpy().size == 0:
            raise RecordError(f"ticket {self.number}: prompt_ids is not a non-empty int32 [P]")
        return self


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """One response, with all that is needed to compute every ratio again later, offline.

    Example: "46" drawn for "12+34=" reversed, then end of text:
    response_ids int32 [3], behavior_logprobs float32 [3] such as [-0.1, -0.7, -0.0], loss_mask uint8 [3] = 1,
    spans [(4, 2, "9f…"), (5, 1, "c2…")] when new weights were swapped in before the last token.
    """

    index: int
    """Place in the group, 0 … G-1."""
    response_ids: Array
    """int32 [T], the end-of-text token included when it was drawn."""
    behavior_logprobs: Array
    """float32 [T] nats: of the distribution that drew the token (temperature and truncation applied)."""
    loss_mask: Array
    """uint8 [T]: 1 where the token counts, 0 for tool output."""
    spans: list[VersionSpan]
    """Sum of tokens = T."""
    finish_reason: FinishReason
    reward: float
    """The whole one: the episode's own, which counts at the end of each path, and the sum of those of turns, on
    the mean over the paths"""
    reward_parts: dict[str, float] = {}
    reward_notes: dict[str, str] = {}
    """Texts that the reward gave beside its numbers, such as a judge's words."""
    valid: bool = True
    """True if the reward says something about the response; an invalid response enters no advantage, no loss
    and no mean."""
    failure: FailureCause | None = None
    """Why scoring failed; with `reward.on_error = "zero"` such a response is valid and has reward 0."""
    routes: Array | None = None
    """uint8 or uint16 [N, L, K]: the K experts that each of L sparse layers sent the first N tokens of prompt
    and response to, N ≤ P + T - 1; None: no experts, or not recorded. L · K bytes a token: 6 for the small
    model of configs/quickstart-moe.toml, 384 for Qwen3-30B-A3B, 700k tokens of which fill MAX_RECORD_BYTES."""

    sampling_mask: Array | None = None
    """int32 [T, K]: the ids that each token was drawn from, ascending, where sampling was truncated; -1 fills
    the rows. None where all could be drawn. 4 · K bytes a token."""
    teacher_logprobs: Array | None = None
    """float32 [T] nats: log π_T of `learner.teacher`, which the learner adds; None without one."""
    branches: tuple[Branch, ...] = ()
    """What else the episode drew (branches.py); all the fields but the reward are of the first path."""
    turn_rewards: tuple[TurnReward, ...] = ()
    """Rewards that turns were given, in the order of their tokens; what the learner makes of them:
    learner/data/turn_rewards.py"""

    @property
    def num_tokens(self) -> int:
        """Number of the first path's tokens"""
        return self.response_ids.shape[0]

    @property
    def all_spans(self) -> list[VersionSpan]:
        """The version spans of all paths, one path after the other"""
        return [*self.spans, *(span for branch in self.branches for span in branch.spans)]

    @property
    def all_tokens(self) -> int:
        """Number of tokens of all paths, those that are shared counted once"""
        return self.num_tokens + sum(b.response_ids.shape[0] for b in self.branches)


class PartialResponse(msgspec.Struct, frozen=True, kw_only=True):
    """A response as far as a worker came with it; the first fields are those of Trajectory."""

    response_ids: Array
    behavior_logprobs: Array
    loss_mask: Array
    spans: list[VersionSpan]
    finish_reason: FinishReason
    """The finish reason of the last turn that ended."""
    turns: int
    """Number of turns that ended."""
    pending: int
    """Tokens at the end that belong to one that has not."""
    ended: bool
    routes: Array | None = None
    sampling_mask: Array | None = None

    def validate(self, ticket: Ticket) -> "PartialResponse":
        """This, if it is the beginning of a response to `ticket`. Raises RecordError."""
        size = self.response_ids.shape[0] if len(self.response_ids.shape) == 1 else -1
        for array, dtype in (
            (self.response_ids, "int32"),
            (self.behavior_logprobs, "float32"),
            (self.loss_mask, "uint8"),
        ):
            if array.dtype != dtype or array.shape != (size,) or array.numpy().size != size:
                raise RecordError("partial response: its columns do not fit")
        logprobs = self.behavior_logprobs.numpy()
        if size and not (logprobs.min() > -np.inf and logprobs.max() <= LARGEST_LOGPROB):
            raise RecordError("partial response: a behaviour log-prob is out of range")
        if size and self.response_ids.numpy().min() < 0:
            raise RecordError("partial response: negative token id")
        if any(s.tokens < 1 for s in self.spans) or sum(s.tokens for s in self.spans) != size:
            raise RecordError("partial response: version spans do not cover it")
        if not (0 <= self.pending <= size and 0 <= self.turns <= size):
            raise RecordError("partial response: impossible counts")
        if self.loss_mask.numpy().sum() > ticket.sampling.max_tokens:
            raise RecordError(
                f"partial response: more than {ticket.sampling.max_tokens} tokens drawn"
            )
        if self.routes is not None:
            prompt = ticket.prompt_ids.shape[0]
            _validate_routes(self.routes, prompt + size, "partial response")
        validate_sampling_mask(self, ticket.masked, "partial response")
        return self


class PartialGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker that ended had drawn of a ticket; whoever claims the ticket goes on from there."""

    schema: Schema = MESSAGE_SCHEMA
    ticket: int
    """Its number."""
    responses: list[PartialResponse]
    """One for each of the group, in order; empty ones had not begun."""


class Group(msgspec.Struct, frozen=True, kw_only=True):
    """All responses to one ticket: the unit that is committed, consumed and logged."""

    schema: Schema = MESSAGE_SCHEMA
    ticket: Ticket
    worker: str
    engine: str
    weight_format: str
    trajectories: list[Trajectory]
    started_s: float
    """Unix time at which the worker began with the ticket."""
    finished_s: float

    def validate(self) -> "Group":
        """This group, if it keeps its contract. Raises RecordError naming trajectory and token."""
        where = f"group of ticket {self.ticket.number}"
        if self.schema > MESSAGE_SCHEMA:
            raise RecordError(f"{where}: schema {self.schema} is newer than {MESSAGE_SCHEMA}")
        in_order = all(t.index == i for i, t in enumerate(self.trajectories))
        if not in_order or not 0 < len(self.trajectories) == self.ticket.group_size:
            raise RecordError(
                f"{where}: has not the {self.ticket.group_size} responses asked for, in order"
            )
        prompt = self.ticket.validate().prompt_ids
        # All together cost a fifth of one after the other, which says what is wrong, and where.
        together = _are_valid(self.trajectories)
        for t in self.trajectories:
            if not together:
                _validate_trajectory(t, f"{where}, trajectory {t.index}")
            if t.routes is not None:
                tokens = prompt.shape[0] + t.num_tokens
                _validate_routes(t.routes, tokens, f"{where}, trajectory {t.index}")
            validate_sampling_mask(t, self.ticket.masked, f"{where}, trajectory {t.index}")
            if t.turn_rewards:
                validate_turn_rewards(t, f"{where}, trajectory {t.index}")
            if t.branches:
                place = f"{where}, trajectory {t.index}"
                budget, masked = self.ticket.sampling.max_tokens, self.ticket.masked
                validate_branches(t, t.branches, prompt.shape[0], budget, masked, place)
                for number, branch in enumerate(t.branches, 1):
                    _validate_branch_routes(branch, t.routes, f"{place}, branch {number}")
        return self

    @property
    def valid_trajectories(self) -> list[Trajectory]:
        """The responses whose reward says something about them."""
        return [t for t in self.trajectories if t.valid]


def _are_valid(trajectories: list[Trajectory]) -> bool:
    """Returns True if `_validate_trajectory` raises for none of them."""
    if not trajectories or not _are_plain(trajectories):
        return False
    at_once = CHECKED_TOKENS // max([t.num_tokens for t in trajectories]) or 1
    starts = range(0, len(trajectories), at_once)
    return all(_are_in_range(trajectories[i : i + at_once]) for i in starts)


def _are_plain(trajectories: list[Trajectory]) -> bool:
    """Returns True if `_validate_trajectory` finds nothing wrong but, perhaps, a token or a log-prob. It is one
    loop without calls, which take twice as long."""
    for t in trajectories:
        ids, logprobs, mask = t.response_ids, t.behavior_logprobs, t.loss_mask
        covered = 0
        for span in t.spans:
            if span.tokens < 1:
                return False
            covered += span.tokens
        if not (
            ids.shape == logprobs.shape == mask.shape == (covered,)
            and covered > 0
            and ids.dtype == "int32"
            and logprobs.dtype == "float32"
            and mask.dtype == "uint8"
            and len(ids.data) == len(logprobs.data) == 4 * covered
            and len(mask.data) == covered
            and (t.valid or t.failure is not None)
            and abs(t.reward) <= LARGEST_REWARD
        ):
            return False
    return True


def _are_in_range(trajectories: list[Trajectory]) -> bool:
    logprobs = _joined([t.behavior_logprobs.data for t in trajectories], "<f4")
    ids = _joined([t.response_ids.data for t in trajectories], "<i4")
    in_range = logprobs.min() > -np.inf and logprobs.max() <= LARGEST_LOGPROB
    return bool(in_range and ids.min() >= 0)


def _joined(columns: list[bytes | memoryview], dtype: str) -> np.ndarray:
    return np.frombuffer(b"".join(columns) if columns[1:] else columns[0], dtype)


def _validate_trajectory(t: Trajectory, where: str) -> None:
    validate_tokens(t, where)
    if not t.valid and t.failure is None:
        raise RecordError(f"{where}: its reward is not valid, and no cause is named")
    if not abs(t.reward) <= LARGEST_REWARD:
        raise RecordError(f"{where}: reward is {t.reward}")


def _validate_routes(routes: Array, tokens: int, where: str) -> None:
    """Raises RecordError for routes of a wrong shape, or of all `tokens` of prompt and response: the last was
    not computed. learner/backends/routing_replay.py checks the numbers."""
    fits = routes.dtype in ("uint8", "uint16") and len(routes.shape) == 3 and min(routes.shape) > 0
    if not fits or routes.shape[0] >= tokens:
        raise RecordError(
            f"{where}: routes {routes.dtype}{list(routes.shape)} are not uint8 or uint16 [N, L, K] with "
            f"N < {tokens} tokens"
        )
    routes.numpy()


def _validate_branch_routes(branch: Branch, first: Array | None, where: str) -> None:
    """Raises RecordError for routes of a branch that do not go on from those of the `first` path."""
    if branch.routes is None:
        return
    _validate_routes(branch.routes, branch.response_ids.shape[0], where)
    kind = first and (first.dtype, first.shape[1:])
    if (branch.routes.dtype, branch.routes.shape[1:]) != kind:
        raise RecordError(f"{where}: its routes are not of the kind of the first path's")


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's heartbeat in Redis; expires when the worker falls silent. Its fields are bounded, as they go
    into sums, logs and displays."""

    worker: Name
    pid: Bounded
    version: Bounded
    active: Bounded
    """Responses being generated."""
    tokens: Bounded
    """Response tokens drawn since the worker started."""
    tokens_per_s: Finite
    """Over the last ten heartbeats."""
    idle_share: Finite
    """Share of the time of these heartbeats in which the engine had nothing to do."""
    groups: Bounded
    swaps: Bounded
    swap_s: Finite
    """Mean pause of generation for a swap of weights."""
    time_s: Finite
    waiting: Bounded = 0
    """Finished groups that wait for room in Redis."""
    full_s: Finite = 0.0
    """Seconds that commits waited for room since the worker started."""
    digest: Name = ""
    """The digest of the weights that the engine runs."""
    behind_s: Finite = 0.0
    """Seconds for which a newer version has been known and none has arrived."""
    stalls: Bounded = 0
    """Times that this went on for longer than `broadcast.stall_s`"""
    slots: Bounded = 0
    """Responses that the engine can generate at once."""
    timeouts: Bounded = 0
    """Responses cut by `rollout.request_timeout_s`"""
    run_id: Name = ""
    """Id of the run that it works for."""
    waits_for: Sentence = ""
    """What keeps it from generating; "" where nothing does."""
    failure: Sentence = ""
    """How its newest response failed that could not be scored; "" while none did."""
    resumed: Bounded = 0
    """Responses that went on from where another worker had to leave them."""
    episodes: Bounded = 0
    """Episodes of its tickets that agents play or may begin."""
    open_episodes: Bounded = 0
    """Those of them that an agent plays now."""
    busy_s: Finite = 0.0
    """Seconds since the worker started in which the engine had something to do."""
    loop_lag_s: Finite = 0.0
    """How late the event loop was, in the worst hundredth of the last 30 s."""
    loop_lag_max_s: Finite = 0.0
    """The most that it was late in them."""
    refused_weights: Bounded = 0
    """Versions that the engine could not use since the worker started: they were of another model."""
