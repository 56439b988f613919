"""Rewards of turns: what each token of an episode still had to gain, and its advantage in its group.

    token        prompt   turn 1   result   turn 2         return of turn 1 = 0.5 + (1 + 0) / 2 + own
    reward                   0.5 ─┬─────────── 1           return of turn 2 = 1 + own
                                  └─ turn 3: 0             return of turn 3 = 0 + own

The return of a token is the sum of the rewards of its turn and of all turns after it, on the mean over the
paths through it, and the episode's own reward, which stands at the end of each path. A reward that comes before
a token is not its doing (the policy gradient's reward to go). The mean over what follows a shared token is a
node's value in TreeRPO (arXiv 2506.05183).

A group's estimator then compares returns after as many rewards: that of a token takes the place of its own
episode, and the others stand there with their means over paths, one that has had its last with the return of
its last turn. What it compares with depends on nothing that the token's turn has done, as a baseline may. So
rewards at the end alone are learnt from as one reward of the episode is, to the bit. (GRPO's own process
supervision, arXiv 2402.03300 §4.1.3, normalises the rewards themselves, whose sum then says nothing about
surviving for longer.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from areal_q.algorithms import group_advantages
from areal_q.algorithms.advantages import Combine, alone
from areal_q.config import AdvantageConfig
from areal_q.messages import Group, Trajectory, mean_of_turns, places, rewards_of_turns


@dataclass(frozen=True)
class Returns:
    """What the T tokens of an episode still had to gain, those of all its paths one path after the other: one
    of R different returns each."""

    row: np.ndarray
    """int64 [T] in 0 … R-1: which of the returns is each token's; -1 for one that does not count"""
    passed: np.ndarray
    """int64 [R]: how many rewards of turns come before it on its path"""
    values: np.ndarray
    """float32 [R]"""
    after: np.ndarray
    """float32 [n]: the mean over the paths after k rewards, for each k after which a path goes on"""

    def standing(self, passed: int) -> float:
        """Returns what others are compared with after so many rewards."""
        return float(self.after[min(passed, len(self.after) - 1)])


def has_turns(t: Trajectory) -> bool:
    """Returns True if any turn of an episode was given a reward."""
    return any(path.turn_rewards for path in (t, *t.branches))


def returns_of(prompt_tokens: int, t: Trajectory, penalty: float = 0.0) -> Returns:
    """Returns the returns of an episode after so many tokens, with its own reward less `penalty`."""
    given = rewards_of_turns(t)
    masks = [path.loss_mask.numpy() != 0 for path in (t, *t.branches)]
    counts, marked = np.concatenate(masks), np.isfinite(given)
    rewards, paths = np.nan_to_num(given), places(prompt_tokens, t)
    total, through = np.zeros(len(given)), np.zeros(len(given))
    passed, ways = np.zeros(len(given), np.int64), list[np.ndarray]()
    for path in paths:
        ahead = np.cumsum(rewards[path][::-1])[::-1]
        total[path] += ahead
        through[path] += 1
        passed[path] = np.cumsum(marked[path]) - marked[path]
        last = passed[path][counts[path]].max(initial=0)
        ways.append(ahead[np.searchsorted(passed[path], np.arange(last + 1))])
    own = t.reward - mean_of_turns(prompt_tokens, t) - penalty
    most = max(map(len, ways))
    each = [np.pad(way, (0, most - len(way)), "edge") for way in ways]
    tokens = (total / through + own).astype(np.float32)
    pairs, row = np.unique(passed[counts] + 1j * tokens[counts], return_inverse=True)
    rows = np.full(len(given), -1)
    rows[counts] = row
    return Returns(
        rows,
        pairs.real.astype(np.int64),
        pairs.imag.astype(np.float32),
        (sum(each[1:], each[0]) / len(each) + own).astype(np.float32),
    )


def is_uniform(group: Group) -> bool:
    """Returns True if all rewards of the group are equal, and all that were to come after each turn, so that
    every advantage would be 0 (DAPO's dynamic sampling, arXiv 2503.14476 §3.2)."""
    valid = group.valid_trajectories
    if len({t.reward for t in valid}) > 1 or not any(map(has_turns, valid)):
        return len({t.reward for t in valid}) == 1
    prompt = group.ticket.prompt_ids.shape[0]
    found = [returns_of(prompt, t) for t in valid]
    own = {(int(k), float(x)) for one in found for k, x in zip(one.passed, one.values, strict=True)}
    turns = {k for k, _ in own}
    return len(own | {(k, one.standing(k)) for k in turns for one in found}) == len(turns)


def turn_advantages(
    episodes: Sequence[tuple[int, Trajectory, float]],
    groups: Sequence[int],
    cfg: AdvantageConfig,
    combine: Combine = alone,
    sources: Sequence[str] = (),
    device: torch.device | None = None,
) -> list[np.ndarray]:
    """Returns the advantages of each episode's tokens, float64 [T], 0 for those that do not count. `episodes`
    are what `returns_of` takes; `groups` and `sources` say of which group, and task, each is; those of a group
    follow each other. They are computed on `device`.

    Each return is compared within a copy of its group. An episode weighs as one in the whole batch's mean.
    """
    found = [returns_of(*episode) for episode in episodes]
    rewards, ids, of, cells = _copies(found, groups)
    weights = np.zeros(len(rewards))
    for one, cell in zip(found, cells, strict=True):
        tokens = np.bincount(one.row[one.row >= 0], minlength=len(cell))
        weights[cell] = tokens / max(1, tokens.sum())
    advantages = group_advantages(
        torch.tensor(rewards, device=device),
        torch.tensor(ids, device=device),
        cfg,
        combine,
        [sources[i] for i in of] if sources else (),
        torch.tensor(weights, device=device),
    ).tolist()
    values = np.array([*advantages, 0.0])  # the last is of tokens that do not count
    return [
        values[np.append(cell, len(advantages))[one.row]]
        for one, cell in zip(found, cells, strict=True)
    ]


def _copies(
    found: Sequence[Returns], groups: Sequence[int]
) -> tuple[list[float], list[int], list[int], list[np.ndarray]]:
    """Returns copies of the groups, in each of which a return takes the place of its episode: what all episodes
    have in them, the number of the copy that this is in, and whose it is; and for each episode where its own
    returns are among these, int64 [R]."""
    rewards, ids, of = list[float](), list[int](), list[int]()
    cells = list[np.ndarray]()
    for _, members in groupby(range(len(found)), key=groups.__getitem__):
        mine, copies = [*members], dict[tuple[int, ...], int]()
        for place, i in enumerate(mine):
            cells.append(np.zeros(len(found[i].values), np.int64))
            for row, (k, value) in enumerate(zip(found[i].passed, found[i].values, strict=True)):
                stands = [found[j].standing(k) for j in mine]
                # Episodes whose return is the one with which they stand for others share a copy.
                copy = (k,) if value == stands[place] else (k, place, row)
                if copy not in copies:
                    stands[place] = float(value)
                    copies[copy] = len(rewards)
                    rewards += stands
                    ids += [ids[-1] + 1 if ids else 0] * len(mine)
                    of += mine
                cells[-1][row] = copies[copy] + place
    return rewards, ids, of, cells
