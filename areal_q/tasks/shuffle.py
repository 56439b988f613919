"""Shuffling without memory: pseudo-random permutations of range(size), by index and key."""

from areal_q.tasks.base import Problem, Task
from areal_q.tasks.ordering.mixture import MixedProblems

ROUNDS = 6
MASK = (1 << 64) - 1


def permute(index: int, size: int, *key: int) -> int:
    """Returns the place of `index` in the permutation of range(size) that `key` picks. Pure; any index, any
    order.

    A Feistel network over the smallest square power of two that holds `size`, walked until it lands inside
    (Black & Rogaway, CT-RSA 2002). For shuffling, not for secrets.
    """
    half = max(1, (size - 1).bit_length() + 1 >> 1)
    low = (1 << half) - 1
    seed = 0
    for k in key:
        seed = _mix(seed ^ (k & MASK))
    while True:
        left, right = index >> half, index & low
        for r in range(ROUNDS):
            left, right = right, left ^ (_mix(seed + (r << half) + right) & low)
        index = left << half | right
        if index < size:
            return index


def problem_at(task: Task, number: int, seed: int) -> Problem:
    """Returns problem `number` of an endless sequence, in which each epoch has all of `task.train` in another
    order; of a mixture that of the task whose turn it is."""
    problems = task.train
    if isinstance(problems, MixedProblems):
        source, number = problems.turn(number)
        problems = problems.parts[source]
    return problems[shuffled(number, len(problems), seed)]


def shuffled(number: int, size: int, seed: int) -> int:
    """Returns the index of problem `number` of such a sequence of `size` problems."""
    epoch, index = divmod(number, size)
    return permute(index, size, seed, epoch)


def _mix(x: int) -> int:
    """SplitMix64's step and finalizer (Steele, Lea & Flood, OOPSLA 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)
