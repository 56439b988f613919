"""Secrets, which are read from files: `ps` shows arguments, `docker inspect` and crash reports the environment.

Every URL in a message goes through `shown`, which leaves out all that may be a secret.
"""

import os
from pathlib import Path
from urllib.parse import SplitResult, parse_qs, urlsplit

import typer

from areal_q.errors import ConfigError

HIDDEN = "…"


def redis_password(url: str) -> str | None:
    """Returns the password in the file that REDIS_PASSWORD_FILE names, without white space around it.

    It is None if the variable is unset, and for a unix socket, which is protected by its permissions. redis-py
    prefers a password in the URL to this one. Raises ConfigError if the file cannot be read or is empty.
    """
    return secret("REDIS_PASSWORD_FILE") if url.startswith(("redis://", "rediss://")) else None


def secret(variable: str) -> str | None:
    """Returns the content of the file that this environment variable names, without white space around it.

    It is None if the variable is unset. Raises ConfigError if the file cannot be read or is empty.
    """
    name = os.environ.get(variable)
    if not name:
        return None
    try:
        content = Path(name).read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{variable}: {reason} - {name}") from error
    if not content:
        raise ConfigError(f"{variable}: {name} is empty")
    return content


def shown(url: str) -> str:
    """Returns `url` for use in a message, with nothing but its scheme, host, port and path.

    Example: redis://me:secret@host:6379/0?password=x is shown as redis://…@host:6379/0?…
    A URL in which a password with `/`, `?`, `#` or `@` may have moved into other parts is shown as redis://…
    """
    parts = _split(url)
    if parts is None:
        known = url.split("://")[0] if "://" in url else ""
        return f"{known}://{HIDDEN}" if known.isalpha() else HIDDEN
    _, at, host = parts.netloc.rpartition("@")
    user, query = f"{HIDDEN}@" if at else "", f"?{HIDDEN}" if parts.query else ""
    return f"{parts.scheme}://{user}{host}{parts.path}{query}"


def check_redis_url(url: str) -> None:
    """Raises ConfigError for a URL in which a part of the password would be read as host, port or database."""
    parts = _split(url)
    by_name = "://" in url and not url.startswith("unix:")
    if by_name and (parts is None or not parts.netloc):
        raise ConfigError(
            f"--redis, or REDIS_URL: {shown(url)} is not redis://HOST:PORT; a password is best in the file "
            "that REDIS_PASSWORD_FILE names, in a URL it must be percent-encoded"
        )


def no_password(ctx: typer.Context, param: typer.CallbackParam, value: str | None) -> str | None:
    """Typer's callback for an option with a Redis URL. Raises ConfigError if the URL comes from the command
    line and has a password, which `ps` would show to every user of the machine."""
    source = ctx.get_parameter_source(param.name or "")
    if value and source is not None and source.name == "COMMANDLINE" and _has_password(value):
        raise ConfigError(
            "--redis: a password in an argument is seen by every user of the machine: name a file with it in "
            "REDIS_PASSWORD_FILE, or set REDIS_URL instead of --redis"
        )
    return value


def _has_password(url: str) -> bool:
    parts = _split(url)
    if parts is None:
        return "@" in url
    return bool(parts.password) or "password" in parse_qs(parts.query)


def _split(url: str) -> SplitResult | None:
    """Returns the parts of `url`; None if it is no URL, or if a password in it may hide where its parts end."""
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - raises ValueError if the port is no number
    except ValueError:
        return None
    odd = not parts.scheme or parts.fragment or "@" in parts.query
    in_path = "@" in parts.path and parts.scheme != "unix"
    return None if odd or in_path else parts
