"""Checks of logged groups that need no model: contract, settings, endless loops."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from areal_q.config import Sampling
from areal_q.messages import Branch, Group, Trajectory

MAX_PERIOD = 16
MIN_LOOP_TOKENS = 16
MIN_REPEATS = 4
"""A loop is at least MIN_LOOP_TOKENS tokens in which the same MAX_PERIOD tokens at most repeat at least
MIN_REPEATS times."""


@dataclass
class LogFacts:
    """Counts over the groups of all examined steps."""

    steps: int = 0
    responses: int = 0
    tokens: int = 0
    missing: int = 0
    """Number of behaviour log-probs that are NaN, infinite or absent."""
    positive: int = 0
    """Number of behaviour log-probs above 0 by more than rounding explains, so that they are no log-probs."""
    after_end: int = 0
    """Number of tokens after an end-of-text token that count nonetheless, such as padding."""
    first_bad: str = ""
    """The step, ticket and response of the first of these faults; empty without any."""
    scored: int = 0
    """Number of responses that have a reward."""
    cut_off: int = 0
    """Number of those that ended before the model ended them."""
    right: int = 0
    """Number of those that are right."""
    loops: int = 0
    """Number of responses with a loop."""
    negative: int = 0
    """Number of responses with less reward than the mean of their group."""
    negative_loops: int = 0
    """Number of responses with both."""
    sampling: Counter[Sampling] = field(default_factory=Counter)
    """Number of responses by the sampling settings that drew them."""
    formats: Counter[str] = field(default_factory=Counter)
    """Number of responses by the number format of the weights that drew them."""


def look_at(steps: Iterable[tuple[int, Sequence[Group]]], end_ids: Sequence[int] = ()) -> LogFacts:
    """Returns counts over `steps`, (step, groups) each, whose groups need not keep their contract. `end_ids`
    are the end-of-text tokens."""
    facts = LogFacts()
    for step, groups in steps:
        facts.steps += 1
        for group in groups:
            rewards = [t.reward for t in group.valid_trajectories]
            facts.scored += len(rewards)
            facts.cut_off += sum(t.finish_reason != "stop" for t in group.valid_trajectories)
            facts.right += sum(map(_is_right, group.valid_trajectories))
            mean = sum(rewards) / max(1, len(rewards))
            facts.sampling[group.ticket.sampling] += len(group.trajectories)
            facts.formats[group.weight_format] += len(group.trajectories)
            for trajectory in group.trajectories:
                where = f"step {step}, ticket {group.ticket.number}, response {trajectory.index}"
                negative = trajectory.valid and trajectory.reward < mean
                for path in (trajectory, *trajectory.branches):
                    _count(facts, path, end_ids, negative, where)
    return facts


def _is_right(t: Trajectory) -> bool:
    return bool(t.reward_parts.get("correct", t.reward >= 1))


def _count(
    facts: LogFacts, t: Trajectory | Branch, end_ids: Sequence[int], negative: bool, where: str
) -> None:
    ids, logprobs = t.response_ids.numpy(), t.behavior_logprobs.numpy()
    counted = t.loss_mask.numpy() != 0
    missing = int((~np.isfinite(logprobs)).sum()) + max(0, len(ids) - len(logprobs))
    positive = int((logprobs > 1e-3).sum())
    # Where a turn ended last, and where a token was given last: a turn may follow on a message behind an end.
    number, ended = np.arange(len(ids)), np.isin(ids, list(end_ids))
    last_end = np.maximum.accumulate(np.where(ended, number, -1))
    last_given = np.maximum.accumulate(np.where(counted, -1, number))
    after_end = int((counted[1:] & (last_end[:-1] > last_given[:-1])).sum())
    loop = has_loop(ids)
    facts.responses += 1
    facts.tokens += len(ids)
    facts.missing += missing
    facts.positive += positive
    facts.after_end += after_end
    facts.loops += loop
    facts.negative += negative
    facts.negative_loops += loop and negative
    if (missing or positive or after_end) and not facts.first_bad:
        facts.first_bad = where


def has_loop(ids: np.ndarray) -> bool:
    """Returns True if `ids`, int [T], contain a loop: a piece of at most MAX_PERIOD tokens, repeated.

    Example: 5 6 7 5 6 7 5 6 7 5 6 7 5 6 7 5: period 3, 16 tokens, 5 times.
    """
    for period in range(1, min(MAX_PERIOD, len(ids) // MIN_REPEATS) + 1):
        needed = max(MIN_LOOP_TOKENS, MIN_REPEATS * period) - period
        if longest_run(ids[period:] == ids[:-period]) >= needed:
            return True
    return False


def longest_run(flags: np.ndarray) -> int:
    """Returns the length of the longest run of True in bool [T]."""
    if not flags.any():
        return 0
    # A run of True lies between two neighbouring False; one is added at each end.
    breaks = np.flatnonzero(~np.concatenate(([False], flags, [False])))
    return int(np.diff(breaks).max()) - 1
