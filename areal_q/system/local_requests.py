"""The choice of HTTP requests that a server on loopback answers without a token: those of local programs.

Any web page that is open in the user's browser can send requests to 127.0.0.1. These are recognised by their
Host (a name of the page's site that resolves to 127.0.0.1), by their Origin, or by a content type that a
browser sends without asking the server first.
"""

from collections.abc import Mapping
from urllib.parse import urlsplit

LOOPBACK = ("127.0.0.1", "localhost", "::1")
FROM_FORMS = ("text/plain", "multipart/form-data")
"""Content types that a page of any site may send, while no client of an API does."""


def is_loopback(host: str) -> bool:
    """Returns True if `host`, with or without a port, is this machine's loopback. Any port will do, as a tunnel
    may end at another one."""
    try:
        return urlsplit(f"//{host}").hostname in LOOPBACK
    except ValueError:
        return False


def refusal(headers: Mapping[str, str]) -> str | None:
    """Returns why a request with these headers may come from a page of another site; None if it cannot."""
    if not is_loopback(headers.get("Host", "")):
        return "Host: only this machine's loopback is served without a token"
    origin = headers.get("Origin")
    if origin is not None and not is_loopback(origin.partition("://")[2]):
        return "Origin: pages of other sites are not answered without a token"
    kind = headers.get("Content-Type", "").partition(";")[0].strip().lower()
    if kind in FROM_FORMS:
        return f"Content-Type: {kind} is not taken without a token; send application/json"
    return None
