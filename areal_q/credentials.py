"""Secrets are read from files: an environment is shown by `ps`, `docker inspect` and crash reports."""

import os
from pathlib import Path

from areal_q.errors import ConfigError


def redis_password(url: str) -> str | None:
    """What the file that REDIS_PASSWORD_FILE names holds, white space around it left out.

    None where it is unset, and for a unix socket, which its permissions guard. redis-py lets a password
    in the URL itself go before this one. Raises ConfigError if the file cannot be read or is empty.
    """
    return secret("REDIS_PASSWORD_FILE") if url.startswith(("redis://", "rediss://")) else None


def secret(variable: str) -> str | None:
    """What the file that this environment variable names holds, white space around it left out.

    None where it is unset. Raises ConfigError if the file cannot be read or is empty.
    """
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        held = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{variable}: {reason} - {name}") from error
    if not held:
        raise ConfigError(f"{variable}: {name} is empty")
    return held
