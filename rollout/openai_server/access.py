"""The rules of who may ask the endpoint: where it listens, its token, and which requests are refused."""

import hmac
from collections.abc import Mapping
from pathlib import Path

from areal_q.errors import ConfigError
from areal_q.system.local_requests import LOOPBACK, refusal
from rollout.environments.external import EPISODE


def bound_to(address: str, token_file: str | None) -> tuple[str, int, bytes | None]:
    """Returns host, port and token for an address [HOST:]PORT. Raises ConfigError if the address is not valid
    or lies beyond loopback without a token, or if the token file cannot be read."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"rollout.serve (--serve): {address!r} is not [HOST:]PORT")
    token = _token(token_file)
    if token is None and host not in LOOPBACK:
        raise ConfigError(
            f"rollout.serve (--serve): {address} is not loopback: AREAL_Q_SERVE_TOKEN_FILE "
            "(--serve-token) must name a file with a token"
        )
    return host, int(port), token


def _token(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        token = Path(path).read_bytes().strip()
    except OSError as error:
        raise ConfigError(
            f"AREAL_Q_SERVE_TOKEN_FILE (--serve-token): {error.strerror or error} - {path}"
        ) from error
    if not token:
        raise ConfigError(f"AREAL_Q_SERVE_TOKEN_FILE (--serve-token): {path} is empty")
    return token


def _key(headers: Mapping[str, str]) -> str | None:
    """Returns the key of a request: OpenAI's header, or Anthropic's; None if it has none."""
    kind, _, key = headers.get("Authorization", "").partition(" ")
    return key if kind == "Bearer" else headers.get("X-Api-Key")


def episode_key(headers: Mapping[str, str]) -> str | None:
    """Returns the episode that a request names as its key, `ep-…`; None if it names none."""
    key = _key(headers)
    return key if key is not None and key.startswith(EPISODE) else None


def denied(headers: Mapping[str, str], token: bytes | None) -> tuple[int, str, str] | None:
    """Returns HTTP status, OpenAI's kind of error and the reason for a request that may not ask; None for one
    that may. Without a token only local programs may."""
    if token is None:
        reason = refusal(headers)
        return None if reason is None else (403, "permission_error", reason)
    # aiohttp keeps bytes that are not UTF-8 as surrogates.
    said = (_key(headers) or "").encode("utf-8", "surrogateescape")
    if hmac.compare_digest(said, token):
        return None
    return 401, "authentication_error", "wrong or missing bearer token"
