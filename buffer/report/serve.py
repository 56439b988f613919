"""The report on loopback: the same page, which fetches every group on demand and polls for new data.

    GET /                                   the page
    GET /data/overview                      metrics of all runs      } with an ETag: 304 as long as nothing
    GET /data/index/RUN                     the list of trajectories } has changed
    GET /data/groups/RUN/STEP/FIRST/COUNT   groups, token by token

RUN is a number. Any other path gives 404, and any other method 405. A Host header that is not this machine's
loopback gives 403, so that no page of another site can read the data by DNS rebinding. Nothing is written.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from hashlib import blake2b
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import msgspec

from areal_q.errors import RecordError
from areal_q.system.local_requests import is_loopback
from buffer.report.packed_arrays import pack_arrays
from buffer.report.page import index_chunk, shell, title_of
from buffer.report.runs import Reported, overview

logger = logging.getLogger(__name__)
MAX_GROUPS = 64
"""Most groups in one answer"""
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class ReportServer(ThreadingHTTPServer):
    """A server of `runs` on 127.0.0.1; port 0 means any free one. Raises OSError if the port is in use."""

    daemon_threads = True

    def __init__(self, runs: Sequence[Reported], port: int = 0) -> None:
        self.runs = runs
        self.lock = threading.Lock()
        """Lock held while runs are read, since a refresh changes them"""
        self.title = title_of(runs)
        super().__init__(("127.0.0.1", port), _Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "areal-q", ""
    timeout = 30

    def do_GET(self) -> None:
        if not is_loopback(self.headers.get("Host", "")):
            self._send(HTTPStatus.FORBIDDEN)
            return
        try:
            with self.server.lock:
                self._answer(self.path.partition("?")[0].strip("/").split("/"))
        except (KeyError, ValueError, IndexError):
            self._send(HTTPStatus.NOT_FOUND)
        except (RecordError, OSError) as error:
            # A resumed run may just have replaced a part of the log; the next request finds the new one.
            logger.warning("%s: %s", self.path, error)
            self._send(HTTPStatus.SERVICE_UNAVAILABLE)

    def _answer(self, path: list[str]) -> None:
        runs = self.server.runs
        match path:
            case [""]:
                page = shell(self.server.title, served=True).encode()
                self._send(HTTPStatus.OK, page, "text/html; charset=utf-8")
            case ["data", "overview"]:
                for run in runs:
                    run.refresh()
                state = [(run.records[-1:], run.index.state) for run in runs]
                self._send_new(state, lambda: pack_arrays(*overview(runs)))
            case ["data", "index", run]:
                index = runs[_number(run)].index
                steps = [index.steps[s] for s in sorted(index.steps)]
                self._send_new(index.state, lambda: index_chunk(steps, len(steps)))
            case ["data", "groups", run, step, first, count]:
                groups = runs[_number(run)].groups
                most = min(_number(count), MAX_GROUPS)
                self._send(HTTPStatus.OK, groups.chunk(_number(step), _number(first), most))
            case _:
                raise KeyError(self.path)

    def _send_new(self, state: Any, make: Callable[[], bytes]) -> None:
        """Sends the result of `make`, or 304 if the browser has it already. The content depends on `state`
        alone."""
        tag = f'"{blake2b(msgspec.json.encode(state), digest_size=16).hexdigest()}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(HTTPStatus.NOT_MODIFIED, tag=tag)
        else:
            self._send(HTTPStatus.OK, make(), tag=tag)

    def _send(
        self,
        status: HTTPStatus,
        body: bytes = b"",
        kind: str = "application/octet-stream",
        tag: str = "",
    ) -> None:
        self.send_response(status)
        for name, value in (*HEADERS.items(), ("Content-Type", kind), ("ETag", tag)):
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Answers the errors that the library itself finds, such as an unknown method, with an empty body."""
        status = HTTPStatus(code)
        self.close_connection = True
        self._send(
            HTTPStatus.METHOD_NOT_ALLOWED if status == HTTPStatus.NOT_IMPLEMENTED else status
        )

    def log_message(self, format: str, *args: Any) -> None:
        logger.debug(format, *args)


def _number(text: str) -> int:
    """Returns the number in `text`. Raises ValueError for anything but decimal digits."""
    if not (text.isascii() and text.isdecimal()):
        raise ValueError(text)
    return int(text)
