"""Every error that this project raises on purpose.

    AReaLQError
    ├── UserError (ValueError)          what a user can mend: one line, exit code 2
    │   ├── ConfigError                 a setting is unknown, ill-typed or out of range
    │   ├── TaskError                   a data file or a reward cannot be used
    │   ├── CheckpointError             a model or checkpoint is missing, torn or misshapen
    │   ├── RunTaken                    another learner has the run in Redis
    │   ├── LogError                    a run's log is missing or lacks a step
    │   └── DivergedError               gradients are not finite, step after step
    ├── RecordError (ValueError)        a message or trajectory breaks its contract
    │   └── ContextExceeded             a request has more tokens than there is room for
    ├── QuantizationError (ValueError)  a tensor cannot be represented in a format
    ├── WeightVersionError              a published version is incomplete or altered
    ├── EngineDied                      the process of an engine ended, or fell silent
    ├── BufferUnavailable               Redis does not answer, or refuses writes
    │   ├── BufferGone                  the same, of a process that was told to go: it ends without Redis
    │   └── BufferFull                  it is at its memory limit: nothing was written, and nothing is lost
    ├── RunChanged                      the run in Redis is not the one that a worker was set up for
    ├── RankLost                        another of a learner's processes ended in the middle of its work
    ├── RunFinished                     the run that a worker works for has done its last step
    ├── ChildDied                       a process of a run ended when it should not have
    ├── TrackerFailed                   a tracker did not take what it was given; the run goes on without it
    ├── TeacherUnavailable              a teacher's server does not answer
    ├── RewardUnavailable               raised by a user's reward: what it needs did not answer
    └── Stopped                         asked to end before there was anything to keep

To add one: derive it from the closest class here, say in one line when it is raised.
"""

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path


class AReaLQError(Exception):
    """Base of all errors below."""

    def lines(self) -> list[str]:
        """Returns the messages that the command line prints: one, except where there are several faults."""
        return [str(self)]


class UserError(AReaLQError, ValueError):
    """What a user can mend; the command line prints its line and exits with 2."""

    def lines(self) -> list[str]:
        return [" ".join(str(self).split())]


class ConfigError(UserError):
    """A setting is unknown, ill-typed, out of range or contradicts another; names the path."""


class SettingsError(ConfigError):
    """Settings that a run cannot have; the message has a line for each fault."""

    def lines(self) -> list[str]:
        return str(self).splitlines()


class TaskError(UserError):
    """A data file or a reward cannot be used; names the file and line."""


class CheckpointError(UserError):
    """A model or checkpoint directory is missing, torn or of another shape; names the file."""


class NotOurs(CheckpointError):
    """A model of a family, or a variant, that our own decoder does not have, though transformers may."""


class RunTaken(UserError):
    """Another learner has the run in Redis; names its process and host."""


class LogError(UserError):
    """A run's log is missing, lacks a step that was asked for, or cannot be written; names its path."""


class DivergedError(UserError):
    """So many optimizer steps in a row had a gradient that is not finite; the weights are those of before."""


class RecordError(AReaLQError, ValueError):
    """A message or trajectory breaks its contract; names the record and the token."""


class ContextExceeded(RecordError):
    """A request has more tokens than the model, its engine or the learner has room for. Clients know it by
    OpenAI's code, or by the words "maximum context length"."""

    code = "context_length_exceeded"


class QuantizationError(AReaLQError, ValueError):
    """A tensor cannot be represented in the format asked for; names the tensor."""


class WeightVersionError(AReaLQError):
    """A published version is incomplete or does not hash to its manifest."""


class EngineDied(AReaLQError):
    """A rollout engine is not running: its process ended, fell silent, or refused weights half-way."""


class BufferUnavailable(AReaLQError):
    """Redis does not answer, or refuses writes."""


class BufferGone(BufferUnavailable):
    """Redis does not answer a process that was told to go, and ends without it: not a failure."""


class BufferFull(BufferUnavailable):
    """Redis is at its memory limit (or cannot write its file): nothing was written. Wait, and try again."""


class RewardUnavailable(AReaLQError):
    """Raised by a user's reward where a judge, a sandbox or a server that it needs did not answer.

    Whatever `reward.zero_on` says, the response is not at fault: see docs/extending.md.
    """


class TeacherUnavailable(AReaLQError):
    """A teacher's server does not answer, however often it is asked: the learner ends, and can be resumed."""


class RunChanged(AReaLQError):
    """The run in Redis has another id, or other settings, than the one that a worker was set up for."""


class RankLost(AReaLQError):
    """Another of a learner's processes ended in the middle of its work, so that this one cannot go on."""


class RunFinished(AReaLQError):
    """The run that a worker works for has done its last step: not a failure."""


class Stopped(AReaLQError):
    """Asked to end before there was anything to keep: not a failure."""


class ChildDied(AReaLQError):
    """A process of a run ended when it should not have; carries the last lines of its log."""


class TrackerFailed(AReaLQError):
    """A tracker did not take what it was given, for a reason of its own; the run goes on without it."""


@contextmanager
def os_errors_as(kind: type[UserError], where: object = None) -> Iterator[None]:
    """Turns an OSError within into `kind`, whose line begins with `where`; by default with the file that the
    error names."""
    try:
        yield
    except OSError as error:
        raise kind(f"{where or error.filename}: {error.strerror or error}") from error


def installing(extra: str) -> str:
    """Returns the command that installs an extra of this package, which no index has, for the Python that runs
    this: from the checkout that it is run from, wherever one is, else from its wheel."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").exists():
        source = ["-e", f"{checkout}[{extra}]"]
    else:
        source = [f"areal_q-{version('areal-q')}-py3-none-any.whl[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *source])


def said_by(error: BaseException) -> str:
    """Returns in one line what an error of another library says: its first line, with the next one where that
    ends in a colon. One that says nothing is named, and so is a key that was looked for in vain."""
    text = str(error)
    if isinstance(error, KeyError) and error.args:
        text = str(error.args[0])  # str of a KeyError is its text in quotes
        if " " not in text:
            return f"{text!r} is not known"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return " ".join(lines[: 1 + lines[0].endswith(":")])
