"""Waits of tests end with what was seen."""

import subprocess
import time

import pytest
from helpers.commands import limit, wait_until


def test_a_wait_ends_with_what_was_seen_when_a_process_ends():
    with (
        subprocess.Popen(["sh", "-c", "exit 3"]) as process,
        pytest.raises(AssertionError, match=r"ended with \[3\]: no step"),
    ):
        wait_until(lambda: False, lambda: "no step", process)


def test_wait_ends_with_what_was_seen_before_the_limit(monkeypatch: pytest.MonkeyPatch):
    assert limit.at_s > time.monotonic()
    monkeypatch.setattr(limit, "at_s", time.monotonic())
    wait_until(lambda: True, lambda: "")
    with pytest.raises(AssertionError, match="waited in vain: no step"):
        wait_until(lambda: False, lambda: "no step")
