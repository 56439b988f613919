"""What a run of pytest left out, and the command that would run it: printed before pytest's own last line."""

from collections import Counter
from collections.abc import Iterator, Sequence

import pytest

COMMANDS = {
    "vllm": "make test-vllm",
    "sglang": "make test-sglang",
    "pages": "make test-pages",
    "agents": "make test-agents",
    "peers": "make test-peers",
    "slow": "make test-slow",
}
"""By marker; the first that a test has counts"""
_deselected = pytest.StashKey[Counter[str]]()


def command(marks: Sequence[str]) -> str | None:
    return next((text for mark, text in COMMANDS.items() if mark in marks), None)


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_deselected] = Counter()


def pytest_deselected(items: Sequence[pytest.Item]) -> None:
    for item in items:
        marks = [mark.name for mark in item.iter_markers()]
        item.config.stash[_deselected][command(marks) or "by -m or -k"] += 1


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker of pytest-xdist tells its controller."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["deselected"] = dict(session.config.stash[_deselected])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    """Every worker of pytest-xdist collects, and so deselects, the same."""
    node.config.stash[_deselected] |= Counter(getattr(node, "workeroutput", {}).get("deselected"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> Iterator[None]:
    """After pytest's own summary of failures."""
    yield
    for line in lines(
        terminalreporter.config.stash[_deselected], terminalreporter.stats.get("skipped", [])
    ):
        terminalreporter.write_line(line)


Report = pytest.TestReport | pytest.CollectReport


def lines(deselected: Counter[str], skipped: Sequence[Report]) -> list[str]:
    """One for each reason, most tests first. Example: "did not run: 112 tests deselected: make test-peers"."""
    counts = Counter({("test", f"deselected: {why}"): count for why, count in deselected.items()})
    counts.update((unit(report), f"skipped: {reason(report)}") for report in skipped)
    return [
        f"did not run: {count} {what}{'s' if count > 1 else ''} {why}"
        for (what, why), count in counts.most_common()
    ]


def unit(report: Report) -> str:
    """Whether it stands for one test, or for all tests of a file that skips itself as it is imported."""
    return "test" if isinstance(report, pytest.TestReport) else "file"


def reason(report: Report) -> str:
    """Why it was skipped, with the command that runs it where its marker has one and the reason names none."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    text = text.removeprefix("Skipped: ").split("\n")[0]
    runs = command(list(report.keywords)) if isinstance(report, pytest.TestReport) else None
    return text if runs is None or "make " in text else f"{text}: {runs}"
