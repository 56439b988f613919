"""Every error that this project raises on purpose.

    AReaLQError
    ├── ConfigError (ValueError)        a setting is unknown, ill-typed or out of range
    ├── TaskError (ValueError)          a data file or a reward cannot be used
    ├── CheckpointError (ValueError)    a model or checkpoint is missing, torn or misshapen
    ├── RecordError (ValueError)        a message or trajectory breaks its contract
    ├── QuantizationError (ValueError)  a tensor cannot be represented in a format
    ├── WeightVersionError              a published version is incomplete or altered
    ├── BufferUnavailable               Redis does not answer, or refuses writes
    └── ChildDied                       a process of a run ended when it should not have

`UserError` groups those that a user can mend: one line on the command line, exit code 2.
To add one: derive it from the closest class here, say in one line when it is raised.
"""


class AReaLQError(Exception):
    """Base of all errors below."""


class ConfigError(AReaLQError, ValueError):
    """A setting is unknown, ill-typed, out of range or contradicts another; names the path."""


class TaskError(AReaLQError, ValueError):
    """A data file or a reward cannot be used; names the file and line."""


class CheckpointError(AReaLQError, ValueError):
    """A model or checkpoint directory is missing, torn or of another shape; names the file."""


class RecordError(AReaLQError, ValueError):
    """A message or trajectory breaks its contract; names the record and the token."""


class QuantizationError(AReaLQError, ValueError):
    """A tensor cannot be represented in the format asked for; names the tensor."""


class WeightVersionError(AReaLQError):
    """A published version is incomplete or does not hash to its manifest."""


class BufferUnavailable(AReaLQError):
    """Redis does not answer, or refuses writes."""


class ChildDied(AReaLQError):
    """A process of a run ended when it should not have; carries the last lines of its log."""


UserError = (ConfigError, TaskError, CheckpointError)
