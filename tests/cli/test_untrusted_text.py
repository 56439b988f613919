"""What models, workers, records and exceptions say reaches neither a terminal nor a log as a command to it."""

import ast
import io
import json
import logging
import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from helpers.paths import ROOT
from hypothesis import given
from hypothesis import strategies as st
from rich.console import RenderableType

from areal_q.checks.machine import CheckResult
from areal_q.config import Run
from areal_q.observability.progress import History
from areal_q.observability.run_summary import ExampleAnswer
from areal_q.observability.service_log import JsonFormatter, TextFormatter
from areal_q.runner.final_screen import _answers
from areal_q.runner.picture import picture
from areal_q.system.command import accept_any_text, console, harmless
from learner.doctor.diagnosis.findings import Finding
from learner.doctor.tables import doctor_screen
from learner.replay.tables import every_metric
from rollout.commands.check import show
from rollout.commands.cluster import _worker_table

HOSTILE = "[/b][link=\x1b]0;x\x07]a\x1b]52;c;cHduZWQ=\x1b\\\x1b[2J\x9b2J\rb\x07\x08c\u202ed\x00"
"""Ends a style of rich and begins a link, writes the clipboard, clears the screen in two ways, overwrites the
line, rings, turns the text around"""
PACKAGES = ("areal_q", "buffer", "learner", "rollout")


def tame(text: str) -> bool:
    return all(c.isprintable() or c in "\n\t" for c in text)


def shown(show: Callable[[], object]) -> str:
    """What reaches stdout and stderr of a command that calls `show`."""
    stream = io.StringIO()
    with redirect_stdout(stream), redirect_stderr(stream):
        accept_any_text()
        show()
    return stream.getvalue()


def logged(text: str) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(TextFormatter("%(message)s"))
    record = logging.LogRecord("worker", logging.INFO, "", 0, "%s says", (text,), None)
    handler.handle(record)


def raised(text: str) -> None:
    try:
        raise RuntimeError(text)
    except RuntimeError:
        traceback.print_exc()


WAYS: dict[str, Callable[[str], object]] = {
    "print": print,
    "print to stderr": lambda text: print(text, file=sys.stderr),
    "echo": typer.echo,
    "echo to stderr": lambda text: typer.echo(text, err=True),
    "lines": lambda text: sys.stdout.writelines([text, text]),
    "log": logged,
    "traceback": raised,
    "console": lambda text: console().print(text),
    "console of stderr": lambda text: console(stderr=True).print(text),
}


@pytest.mark.parametrize("way", WAYS)
def test_no_way_of_printing_lets_a_command_through(way: str):
    said = shown(lambda: WAYS[way](HOSTILE))
    assert "cHduZWQ=" in said and tame(said), ascii(said)


@given(st.text())
def test_harmless_json_is_the_same_document(text: str):
    """So that --json can be read by programs, whatever it holds."""
    written = json.dumps({"text": text}, ensure_ascii=False)
    assert json.loads(harmless(written)) == {"text": text}


def test_a_log_line_stays_one_line():
    record = logging.LogRecord(
        "w", logging.INFO, "", 0, "%s joins", ("x\n2026 learner fine",), None
    )
    assert "\n" not in TextFormatter("%(message)s").format(record)
    assert tame(JsonFormatter("w").format(record))


def hostile_step() -> Any:
    return SimpleNamespace(record=SimpleNamespace(metrics={HOSTILE: 1.0}), metrics={})


def hostile_cluster() -> Any:
    numbers = ("version", "tokens_per_s", "idle_share", "active", "groups", "waiting")
    worker = SimpleNamespace(
        worker=HOSTILE, episodes=0, open_episodes=0, **dict.fromkeys(numbers, 0)
    )
    return SimpleNamespace(version=1, workers=[worker])


def hostile_history() -> History:
    history = History(Run(steps=3))
    worker = {"worker": HOSTILE, "version": 1, "tokens_per_s": 1.0}
    history.add({"kind": "step", "step": 1, "elapsed_s": 1.0, "time_s": 1.0, "workers": [worker]})
    history.add({"kind": "warning", "step": 1, "elapsed_s": 1.0, "time_s": 1.0, "message": HOSTILE})
    return history


SCREENS: dict[str, Callable[[], RenderableType]] = {
    "answers": lambda: _answers([ExampleAnswer(HOSTILE, HOSTILE, HOSTILE, HOSTILE, False, True)]),
    "picture": lambda: picture("run", hostile_history(), 1.0, [HOSTILE], HOSTILE, 100),
    "metrics": lambda: every_metric(hostile_step()),
    "workers": lambda: _worker_table(hostile_cluster()),
}


@pytest.mark.parametrize("screen", SCREENS)
def test_screens_show_what_is_hostile_as_text(screen: str):
    said = shown(lambda: console().print(SCREENS[screen]()))
    assert "2J" in said and tame(said), ascii(said)


@pytest.mark.parametrize(
    "tags", ["[/INST]", "[link=http://a.b/\x1b]0;title\x1b\\]see[/link]", ":x:"]
)
def test_brackets_in_what_others_say_are_no_style(tags: str, monkeypatch):
    """A closing tag alone would be an error, and the address of a link would reach a terminal as it is."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    finding = Finding("rewards fail", "error", 1.0, tags, tags)
    x: Any = SimpleNamespace(
        directory=Path("runs") / tags, first=0, stop=1, findings=[finding], note=tags, exact=False,
        facts=SimpleNamespace(responses=1, tokens=1, formats={tags: 1}), tokens=(),
    )  # fmt: skip
    checks = [CheckResult(tags, "error", tags, tags)]
    for screen in (lambda: doctor_screen(x, console()), lambda: show(checks)):
        said = shown(screen)
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
        assert said != plain and plain.count(tags[:6]) >= 3 and tame(plain), ascii(said)


def test_every_command_and_console_is_made_harmless():
    """Whoever prints on his own, by another console or without the streams of a command, is found here."""
    consoles, commands = [], []
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            text = path.read_text()
            name = str(path.relative_to(ROOT))
            calls = [n.func for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
            called = {f.id if isinstance(f, ast.Name) else getattr(f, "attr", "") for f in calls}
            if "Console" in called:
                consoles.append(name)
            starts = 'if __name__ == "__main__":' in text and (
                "print" in called or "echo" in called
            )
            if starts and not called & {"run_command", "accept_any_text", "main"}:
                commands.append(name)
    assert consoles == []
    # It prints numbers, and runs every few seconds in a container, so that it imports little.
    assert commands == ["areal_q/observability/health.py"]
