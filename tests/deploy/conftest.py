"""A table, at the end of a run of pytest, of what tests of a real system did and saw.

A test adds a row by `record_property("done", TEXT)` and `record_property("seen", TEXT)`, of which there may be
several. A failed or skipped test that has said what it does has a row too.
"""

from collections import defaultdict
from collections.abc import Iterable

import pytest


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    reports = [r for group in terminalreporter.stats.values() for r in group]
    lines = table(report for report in reports if isinstance(report, pytest.TestReport))
    if lines:
        terminalreporter.section("seen")
        for line in lines:
            terminalreporter.write_line(line)


def table(reports: Iterable[pytest.TestReport]) -> list[str]:
    """Returns the lines of a Markdown table with one row per test, in the order in which the tests ran; none if
    no test said what it did."""
    phases = defaultdict(list)
    for report in sorted(reports, key=lambda report: report.start):
        phases[report.nodeid].append(report)
    found = [row for row in map(_row, phases.values()) if row]
    head = "| done | seen | seconds |", "|---|---|---|"
    return [*head, *found] if found else []


def _row(phases: list[pytest.TestReport]) -> str:
    """Returns the row of a test, given the reports of its set-up, call and end; "" if it said nothing."""
    said = phases[-1].user_properties
    done = "; ".join(str(text) for name, text in said if name == "done")
    seen = [str(text) for name, text in said if name == "seen"]
    seen += [f"{phase.outcome}: {_reason(phase)}" for phase in phases if not phase.passed]
    seconds = sum(phase.duration for phase in phases)
    return f"| {done} | {'; '.join(seen)} | {seconds:.0f} |" if done else ""


def _reason(phase: pytest.TestReport) -> str:
    """Returns the first line of why a test failed or was skipped."""
    if isinstance(phase.longrepr, tuple):
        return phase.longrepr[2]
    crash = getattr(phase.longrepr, "reprcrash", None)
    return (crash.message if crash else phase.longreprtext or "no reason").splitlines()[0]
