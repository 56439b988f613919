"""What the responses in a run's log are worth under another reward: no weights are read, no step is taken."""

import asyncio
import csv
import heapq
import logging
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import msgspec
from rich.table import Table
from rich.text import Text

from areal_q.config import External, Python, PythonEnvironment, Run, override
from areal_q.config.load import Override, pair_of
from areal_q.errors import ConfigError, LogError, TaskError
from areal_q.messages import Group, Ticket
from areal_q.observability.run_summary import evenly
from areal_q.system.command import one_line
from areal_q.tasks import (
    Problem,
    Reward,
    Tokenizer,
    build_reward,
    build_task,
    build_tokenizer,
    check_reward,
    columns_for,
    logged_response,
)
from areal_q.tasks.lazy import Lazy
from areal_q.tasks.ordering.mixture import parts_of
from buffer.logs.trajectory_log import iter_log
from learner.replay.tables import MAX_ROWS

logger = logging.getLogger(__name__)
_OF_REWARDS = re.compile(r"(task\.sources\.[^.]+\.)?(reward|reward\..+|task\.(grader|path))")
MOST = 10
"""Responses that are shown, those that differ most"""


def asks_for_rewards(run: Run, settings: Sequence[Override]) -> bool:
    """Returns True if `settings` change the rewards of `run`, and nothing but them; `reward.on_error` by itself
    is one of the learner's steps, which needs no score. Raises ConfigError if they change other things too."""
    names = [pair_of(setting)[0] for setting in settings]
    rewards = [name for name in names if _OF_REWARDS.fullmatch(name)]
    # The path of other tasks is that of their problems.
    rewards = [n for n in rewards if n != "task.path" or isinstance(run.task, Python)]
    if not {*rewards} - {"reward.on_error"}:
        return False
    for name in names:
        if name not in rewards:
            raise ConfigError(
                f"{name}: not beside {rewards[0]}: another reward is compared by itself, without learner steps"
            )
    return True


class Worth(NamedTuple):
    """A response under both rewards, each nan where that one failed."""

    step: int
    ticket: int
    source: str
    """The mixture's task; "" where there is one task"""
    prompt: str
    text: str
    logged: float
    now: float

    @property
    def gap(self) -> float:
        return abs(self.now - self.logged)


@dataclass(frozen=True)
class RescoredStep:
    """The responses of one step, of one task where there are several. Means are over those that both rewards
    could score, and nan without any."""

    step: int
    source: str
    responses: int
    failed: int
    """Responses that the present reward could not score"""
    logged: float
    """Mean reward in the log"""
    now: float
    """Mean reward of the same responses now"""
    alike: float
    """Share of them that both rewards value alike"""
    uniform_logged: float
    """Share of the groups whose responses all have one reward, so that nothing is learnt from them"""
    uniform_now: float


@dataclass
class Rescored:
    """A log under another reward."""

    rows: list[RescoredStep] = field(default_factory=list)
    most: list[Worth] = field(default_factory=list)
    """The responses that differ most, the largest difference first"""
    failure: str = ""
    """How the newest response failed that could not be scored; "" if none did"""


def rescored(
    directory: Path,
    recorded: Run,
    settings: Sequence[Override],
    first: int = 0,
    stop: int | None = None,
) -> Rescored:
    """Scores the responses of steps `first` … `stop` - 1 in the log of the run in `directory` with the reward
    of its settings `recorded`, changed by `settings`.

    Raises ConfigError for a run whose rewards came from an environment, and for settings that cannot be;
    TaskError for a reward that cannot be loaded, or scores nothing; LogError if there are no such steps.
    """
    environment = recorded.rollout.environment
    if isinstance(environment, External | PythonEnvironment):
        kind = environment.__struct_config__.tag
        raise ConfigError(
            f"{directory}: rollout.environment.type = {kind!r}: whoever played the episodes scored them, by "
            "what their text does not tell, so they cannot be scored again"
        )
    run = override(recorded, *settings)
    check_reward(run)
    tokenizer = build_tokenizer(run.model, run.task)
    log = iter_log(directory / "trajectories", first, stop)
    problem_of = _with_columns(recorded, run)
    found = asyncio.run(_rescored(build_reward(run), tokenizer, log, problem_of))
    if not found.rows:
        raise LogError(f"{directory / 'trajectories'}: no such steps")
    if all(row.failed == row.responses for row in found.rows):
        raise TaskError(f"no response could be scored: {found.failure}")
    return found


def _with_columns(recorded: Run, run: Run) -> Callable[[Ticket], Problem]:
    """Returns what makes the problem of a logged ticket. The log has the columns that the reward of the run as
    `recorded` asked for. Others that the reward of `run` asks for are those of the task's data; where they are
    not found, one line says so."""
    before, now = (
        found if isinstance(found, dict) else {"": found}
        for found in map(columns_for, (recorded, run))
    )
    asked = {name for name in now if now[name] not in ((), before[name])}
    rows: dict[tuple[str, str, str], set[str]] = {}
    why = "the data have not one row with its prompt and answer"
    try:
        parts = parts_of(build_task(recorded.task, columns_for(run)).train) if asked else {}
        for name in asked:
            for p in () if isinstance(parts[name], Lazy) else parts[name]:
                rows.setdefault((name, p.prompt, p.answer), set()).add(p.columns)
        asked -= {name for name in asked if isinstance(parts[name], Lazy)}
    except (ConfigError, TaskError) as error:
        why = str(error)
    told = False

    def problem_of(ticket: Ticket) -> Problem:
        nonlocal told
        problem = Problem.of_ticket(ticket)
        if ticket.source not in asked:
            return problem
        found = rows.get((ticket.source, ticket.prompt, ticket.answer), set())
        if len(found) == 1:
            return msgspec.structs.replace(problem, columns=next(iter(found)))
        if not told:
            told = True
            logger.warning("ticket %d: no columns of its row but the log's: %s", ticket.number, why)
        return problem

    return problem_of


async def _rescored(
    reward: Reward,
    tokenizer: Tokenizer,
    log: Iterable[tuple[int, list[Group]]],
    problem_of: Callable[[Ticket], Problem],
) -> Rescored:
    rows, most, failure = list[RescoredStep](), list[Worth](), ""
    await reward.start()
    try:
        for step, groups in log:
            worths = await asyncio.gather(
                *(_worths(step, g, problem_of(g.ticket), reward, tokenizer) for g in groups)
            )
            for source in sorted({group.ticket.source for group in groups}):
                some = [w for w, g in zip(worths, groups, strict=True) if g.ticket.source == source]
                rows.append(_row(step, source, some))
            differing = (w for some in worths for w in some if w.gap > 0)
            most = heapq.nlargest(MOST, [*most, *differing], key=lambda worth: worth.gap)
    finally:
        failure = reward.failure
        await reward.close()
    return Rescored(rows, most, failure)


async def _worths(
    step: int, group: Group, problem: Problem, reward: Reward, tokenizer: Tokenizer
) -> list[Worth]:
    ticket = group.ticket
    said = [logged_response(ticket, logged, tokenizer) for logged in group.trajectories]
    scores = await reward(problem, said)
    return [
        Worth(
            step,
            ticket.number,
            ticket.source,
            ticket.prompt,
            response.text,
            logged.reward if logged.valid else math.nan,
            score.reward if score.valid else math.nan,
        )
        for logged, response, score in zip(group.trajectories, said, scores, strict=True)
    ]


def _row(step: int, source: str, groups: Sequence[Sequence[Worth]]) -> RescoredStep:
    each = [worth for group in groups for worth in group]
    both = [worth for worth in each if not math.isnan(worth.gap)]
    return RescoredStep(
        step=step,
        source=source,
        responses=len(each),
        failed=sum(math.isnan(worth.now) for worth in each),
        logged=_mean([worth.logged for worth in both]),
        now=_mean([worth.now for worth in both]),
        alike=_mean([math.isclose(worth.logged, worth.now, abs_tol=1e-9) for worth in both]),
        uniform_logged=_mean([_uniform(worth.logged for worth in group) for group in groups]),
        uniform_now=_mean([_uniform(worth.now for worth in group) for group in groups]),
    )


def _uniform(rewards: Iterable[float]) -> bool:
    return len({reward for reward in rewards if not math.isnan(reward)}) == 1


def _mean(values: Sequence[float]) -> float:
    return fmean(values) if values else math.nan


def write_rows(found: Rescored, path: Path) -> None:
    """Writes a line for each step, and task where there are several, into the file `path`."""
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, asdict(found.rows[0]))
        writer.writeheader()
        writer.writerows(map(asdict, found.rows))


def rows_table(found: Rescored) -> Table:
    """Returns a table of steps, evenly spaced from the first to the last."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    task = "task" if any(row.source for row in found.rows) else ""
    titles = ("step", task, "responses", "not scored", "reward\nlogged", "\nnow", "alike")
    for title in (*titles, "uniform groups\nlogged", "\nnow"):
        table.add_column(title, justify="right")
    for row in evenly(found.rows, MAX_ROWS):
        shares = (row.alike, row.uniform_logged, row.uniform_now)
        alike, *uniform = (f"{share:.0%}" for share in shares)
        means = (f"{mean:.3g}" for mean in (row.logged, row.now))
        counts = (row.responses, row.failed)
        table.add_row(str(row.step), row.source, *map(str, counts), *means, alike, *uniform)
    return table


def most_table(found: Rescored) -> Table:
    """Returns a table of the responses that differ most."""
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for title in ("step", "ticket", "logged", "now", "prompt", "response"):
        words = title in ("prompt", "response")
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    for worth in found.most:
        numbers = (str(worth.step), str(worth.ticket), f"{worth.logged:.3g}", f"{worth.now:.3g}")
        table.add_row(*numbers, *(Text(one_line(text)) for text in (worth.prompt, worth.text)))
    return table
