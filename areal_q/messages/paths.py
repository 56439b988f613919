"""The paths of an episode, each as a trajectory of its own tokens (branches.py)."""

from collections.abc import Iterator, Sequence

import numpy as np
from msgspec.structs import replace

from areal_q.messages.branches import Branch
from areal_q.messages.tokens import Array
from areal_q.messages.trajectories import Trajectory


def parts(prompt: np.ndarray, t: Trajectory) -> Iterator[tuple[np.ndarray, Trajectory]]:
    """Yields each path of an episode as what stands before its own tokens, int32 [P], and these as a trajectory
    of the same index and reward: first `prompt` and `t` itself, then each branch. All their tokens together are
    the episode's, each once; so the notes on the reward are the first path's."""
    yield prompt, t
    paths = [np.concatenate((prompt, t.response_ids.numpy()))] if t.branches else []
    routes = [t.routes.numpy() if t.branches and t.routes else None]
    for branch in t.branches:
        before = paths[branch.parent][: branch.at]
        paths.append(np.concatenate((before, branch.response_ids.numpy())))
        routes.append(_routes(routes[branch.parent], branch))
        yield (
            before,
            replace(
                t,
                response_ids=branch.response_ids,
                behavior_logprobs=branch.behavior_logprobs,
                loss_mask=branch.loss_mask,
                spans=branch.spans,
                finish_reason=branch.finish_reason,
                teacher_logprobs=branch.teacher_logprobs,
                turn_rewards=branch.turn_rewards,
                sampling_mask=branch.sampling_mask,
                routes=None if routes[-1] is None else Array.of(routes[-1]),
                reward_notes={},
                branches=(),
            ),
        )


def _routes(parent: np.ndarray | None, branch: Branch) -> np.ndarray | None:
    """Returns the experts of a branch's path from its first token on: its parent's, and its own where nothing
    is missing between."""
    if parent is None or len(parent) < branch.at or branch.routes is None:
        return None if parent is None else parent[: branch.at]
    return np.concatenate((parent[: branch.at], branch.routes.numpy()))


def with_teacher(t: Trajectory, logprobs: Sequence[np.ndarray]) -> Trajectory:
    """Returns `t` with log π_T of the tokens of each of its `parts`, float32 [T] each, in their order."""
    own, *others = (Array.of(part, "float32") for part in logprobs)
    pairs = zip(t.branches, others, strict=True)
    branches = tuple(replace(branch, teacher_logprobs=found) for branch, found in pairs)
    return replace(t, teacher_logprobs=own, branches=branches)


def places(prompt_tokens: int, t: Trajectory) -> list[np.ndarray]:
    """Returns for each path which of the episode's tokens it is made of, int64: these are numbered path by
    path, each path's own, and the `prompt_tokens` before them are left out."""
    found = [np.concatenate((np.full(prompt_tokens, -1), np.arange(t.num_tokens)))]
    begin = t.num_tokens
    for branch in t.branches:
        end = begin + branch.response_ids.shape[0]
        found.append(np.concatenate((found[branch.parent][: branch.at], np.arange(begin, end))))
        begin = end
    return [path[path >= 0] for path in found]


def rewards_of_turns(t: Trajectory) -> np.ndarray:
    """Returns float64 [all tokens] the rewards that turns were given, each at its last token, NaN elsewhere."""
    found, begin = np.full(t.all_tokens, np.nan), 0
    for path in (t, *t.branches):
        for given in path.turn_rewards:
            found[begin + given.token] = given.reward
        begin += path.response_ids.shape[0]
    return found


def mean_of_turns(prompt_tokens: int, t: Trajectory) -> float:
    """Returns the sum of the rewards of a path's turns, on the mean over the paths of the episode."""
    rewards = np.nan_to_num(rewards_of_turns(t))
    paths = places(prompt_tokens, t)
    return sum(float(np.cumsum(rewards[path])[-1]) for path in paths) / len(paths)
