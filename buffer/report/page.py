"""Builds the page from static/: one HTML file with the chunks of its runs in it, or without chunks if it is
served.

Its content security policy allows a browser nothing but the page's own script and style, by their hashes.
Chunks are in base64, which has no character with a meaning in HTML.
"""

import base64
import hashlib
import html
import re
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files
from itertools import count

import numpy as np

from areal_q.observability.metric_table import METRICS
from buffer.report.index import StepIndex, to_chunk
from buffer.report.packed_arrays import pack_arrays
from buffer.report.runs import Reported, overview

_SCRIPTS = (
    "data.js",
    "dom.js",
    "plots.js",
    "tables.js",
    "listing.js",
    "shades.js",
    "details.js",
    "viewer.js",
    "main.js",
)
_BLOCK_TRAJECTORIES = 64
"""Most trajectories in a chunk of a file: enough to compress well, and few enough to open at once"""
_SAMPLED_STEPS = 16
_INDEX_SHARE = 0.4
"""Largest share of a file's budget that the list of all trajectories may take"""


def shell(title: str, chunks: Sequence[tuple[str, bytes]] = (), served: bool = False) -> str:
    """Returns the page. `chunks` are pairs (name, bytes); without them the page requests them from its
    server."""
    script = "\n".join(_static(name) for name in _SCRIPTS)
    style = _static("report.css")
    parts = {
        "policy": _policy(script, style, served),
        "title": html.escape(title),
        "style": style,
        "script": script,
        "source": "served" if served else "file",
        "chunks": "\n".join(_embedded(name, body) for name, body in chunks),
    }
    # One pass fills in everything, so that no placeholder in the content is replaced.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _static("page.html"))


def _policy(script: str, style: str, served: bool) -> str:
    """Returns the content security policy of the page."""
    connect = "'self'" if served else "'none'"
    return (
        f"default-src 'none'; script-src 'sha256-{_sha256(script)}'; "
        f"style-src 'sha256-{_sha256(style)}'; img-src data:; "
        f"connect-src {connect}; base-uri 'none'; form-action 'none'"
    )


def whole_file(runs: Sequence[Reported], max_bytes: int) -> str:
    """Returns the page as one file of at most about `max_bytes`.

    It always has the curves. The list of trajectories takes up to _INDEX_SHARE of the budget, from the newest
    step backwards, and the groups of as many steps as there is room for take the rest, in the order of
    `interesting`.
    """
    chunks = [("overview", pack_arrays(*overview(runs)))]
    room = max_bytes - len(shell(title_of(runs), chunks))
    listed = []
    for i, run in enumerate(runs):
        steps, body = _index_within(run, int(room * _INDEX_SHARE / len(runs)))
        listed.append(steps)
        chunks.append((f"index/{i}", body))
    room -= sum(_size(body) for _, body in chunks[1:])
    for i, run in enumerate(runs):
        share = room // (len(runs) - i)
        for name, body in _blocks(run, listed[i], share):
            chunks.append((f"groups/{i}/{name}", body))
            room -= _size(body)
    return shell(title_of(runs), chunks)


def index_chunk(steps: Sequence[StepIndex], total: int) -> bytes:
    """Returns the chunk that lists `steps`; `total` is the number of all logged steps."""
    meta, arrays = to_chunk(list(steps))
    return pack_arrays(meta | {"logged_steps": total}, arrays)


def interesting(run: Reported, steps: Sequence[int]) -> list[int]:
    """Returns all of `steps`, the most interesting first: the first and the last; those where a leading metric
    was largest, or smallest if much of it is good; then the others by bisection.

    The metrics of step s of the log are in the record of step s + 1.
    """
    records = {r["step"] - 1: r for r in run.steps}
    known = [s for s in steps if s in records]
    first = [steps[0], steps[-1]] if steps else []
    for metric in (m for m in METRICS if m.leading):
        worst = min if metric.best == "max" else max
        having = {s: value for s in known if (value := records[s].get(metric.key)) is not None}
        if having:
            first.append(worst(having, key=having.__getitem__))
    return list(dict.fromkeys([*first, *(steps[i] for i in bisection(len(steps)))]))


def bisection(length: int) -> Iterator[int]:
    """Yields 0 … length - 1 in an order of which every beginning is spread evenly: 0, 2, 1, 3, 4 for length
    5."""
    seen: set[int] = set()
    for level in count():
        if len(seen) >= length:
            return
        for i in np.unique(np.arange(2**level) * length // 2**level).tolist():
            if i not in seen:
                seen.add(i)
                yield i


def _index_within(run: Reported, max_bytes: int) -> tuple[list[StepIndex], bytes]:
    """Returns the newest steps whose list fits into `max_bytes`, and the chunk with the list."""
    steps = [run.index.steps[s] for s in sorted(run.index.steps)]
    total = len(steps)
    # The size of a few steps shows about how many fit, so that no list is packed that is much too long.
    few = steps[-_SAMPLED_STEPS:]
    fitting = int(max(0, max_bytes) / max(1, _size(index_chunk(few, total))) * len(few) * 1.2)
    steps = steps[max(0, total - max(fitting, len(few))) :]
    body = index_chunk(steps, total)
    while _size(body) > max_bytes and steps:
        keep = int(len(steps) * max(0, max_bytes) / _size(body) * 0.95)
        steps = steps[len(steps) - keep :]
        body = index_chunk(steps, total)
    return steps, body


def _blocks(
    run: Reported, listed: Sequence[StepIndex], max_bytes: int
) -> Iterator[tuple[str, bytes]]:
    """Yields (STEP/FIRST/COUNT, chunk) of consecutive groups, until the next chunk would not fit."""
    by_step = {one.step: one for one in listed}
    for step in interesting(run, sorted(by_step)):
        sizes = by_step[step].size
        each = max(1, _BLOCK_TRAJECTORIES // int(sizes.max()))
        for first in range(0, len(sizes), each):
            body = run.groups.chunk(step, first, each)
            max_bytes -= _size(body)
            if max_bytes < 0:
                return
            yield f"{step}/{first}/{min(each, len(sizes) - first)}", body


def _embedded(name: str, body: bytes) -> str:
    data = base64.b64encode(body).decode()
    return (
        f'<script type="text/plain" class="chunk" data-name="{html.escape(name)}">{data}</script>'
    )


def _size(body: bytes) -> int:
    """Returns the number of bytes that a chunk takes in a file."""
    return len(body) * 4 // 3 + 90


def title_of(runs: Sequence[Reported]) -> str:
    return ", ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"


@cache
def _static(name: str) -> str:
    return files("buffer.report").joinpath("static", name).read_text(encoding="utf-8")


def _sha256(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
