"""The HTTP requests that a server on loopback without a token answers: those of programs on this machine.

A page of any site that is open in the user's browser can reach 127.0.0.1. It is told apart by the Host that it
asks for (a name of its own that resolves to 127.0.0.1), by its Origin, and by content types that a browser
sends without asking the server first.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FROM_FORMS = ("text/plain", "multipart/form-data")
"""Content types that no client of an API sends, and a page of any site may."""


def is_loopback(host: str) -> bool:
    """Returns True if `host`, with or without a port, is this machine's loopback. The port does not matter: a
    tunnel's end may have another."""
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False


def refusal(headers: Mapping[str, str]) -> str | None:
    """Returns why a request with these headers may come from a page of another site; None where it does not."""
    if not is_loopback(headers.get("Host", "")):
        return "Host: only this machine's loopback is served without a token"
    origin = headers.get("Origin")
    if origin is not None and not is_loopback(origin.partition("://")[2]):
        return "Origin: pages of other sites are not answered without a token"
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in FROM_FORMS:
        return f"Content-Type: {kind} is not taken without a token; send application/json"
    return None
