"""HTTP requests of this machine to itself: they go through no proxy, and a server on loopback answers those of
local programs without a token.

Any web page that is open in the user's browser can send requests to 127.0.0.1. These are recognised by their
Host (a name of the page's site that resolves to 127.0.0.1), by their Origin, or by a content type that a
browser sends without asking the server first.
"""

import os
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

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


def open_url(request: Request, timeout_s: float) -> Any:
    """Returns the answer as urllib's `urlopen` does, and raises what that raises; a request to loopback goes
    through no proxy, whatever the environment says."""
    direct = [ProxyHandler({})] if is_loopback(request.host) else []
    return build_opener(*direct).open(request, timeout=timeout_s)


def environment_without_proxy(url: str) -> dict[str, str]:
    """Returns the environment of a child whose requests to `url`'s host and to loopback go through no proxy."""
    given = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = filter(None, (given, *LOOPBACK, urlsplit(url).hostname))
    names = given if given == "*" else ",".join(hosts)
    return {**os.environ, "no_proxy": names, "NO_PROXY": names}


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
