"""Logging of a service to stderr: lines for people, or one JSON object per line for machines."""

import json
import logging
import os
import time

from areal_q.errors import ConfigError
from areal_q.system.command import escaped

LOG_FORMAT = "AREAL_Q_LOG"
"""The environment variable that chooses the format: `text`, the default, or `json`."""
LOG_LEVEL = "AREAL_Q_LOG_LEVEL"
"""The environment variable that chooses the least level that is written, one of LEVELS: `info` by default."""
LEVELS = ("debug", "info", "warning", "error")


class TextFormatter(logging.Formatter):
    """Formats a record as one line, whatever its message holds; an exception follows on lines of its own."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = escaped(record.message)
        return super().formatMessage(record)


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object with the keys time (RFC 3339, UTC), level, service, logger, message,
    and trace if there is an exception."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        moment = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{moment}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["trace"] = self.formatException(record.exc_info)
        return json.dumps(line)


def set_up(service: str) -> None:
    """Sets up logging of this process in the format that AREAL_Q_LOG names, from the level on that
    AREAL_Q_LOG_LEVEL names.

    Raises ConfigError for any other format or level.
    """
    chosen = os.environ.get(LOG_FORMAT) or "text"
    if chosen not in ("text", "json"):
        raise ConfigError(f"{LOG_FORMAT}: {chosen!r} is neither text nor json")
    level = os.environ.get(LOG_LEVEL) or "info"
    if level not in LEVELS:
        raise ConfigError(f"{LOG_LEVEL}: {level!r} is none of {', '.join(LEVELS)}")
    handler = logging.StreamHandler()
    text = TextFormatter("%(asctime)s %(name)s %(message)s")
    handler.setFormatter(JsonFormatter(service) if chosen == "json" else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
