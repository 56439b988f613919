"""`.ci/run` with a stand-in for make, which notes its targets, and fails or stays as it is told."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.commands import is_alive, wait_until
from helpers.paths import ROOT

MAKE = """#!/usr/bin/env bash
echo "said by $1"
case " $STAY " in *" $1 "*)
  bash -c 'echo $$ >"$0"; exec sleep 600' "$TOLD/$1"
esac
case " $FAIL " in *" $1 "*) exit 7; esac
"""


def started(
    tmp_path: Path, fail: str = "", stay: str = "", **settings: str
) -> subprocess.Popen[str]:
    make = tmp_path / "bin" / "make"
    make.parent.mkdir()
    make.write_text(MAKE)
    make.chmod(0o755)
    told = {"FAIL": fail, "STAY": stay, "TOLD": str(tmp_path), **settings}
    path = {"PATH": f"{make.parent}:{os.environ['PATH']}", "TMPDIR": str(tmp_path)}
    return subprocess.Popen(
        [ROOT / ".ci" / "run"], env=os.environ | told | path, text=True, stdout=-1, stderr=-2,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fail", "code", "last"),
    [
        ("", 0, "test-verifiers"),
        ("browser crds", 0, "test-verifiers"),
        (".venv-verifiers/.installed", 0, "test-vllm"),
        ("docs", 7, "check"),
        ("check", 7, "check"),
        ("docs check", 7, "check"),
        ("test", 7, "test"),
        ("test-peers", 7, "test-verifiers"),
        ("test-vllm", 7, "test-vllm"),
        ("test-verifiers", 7, "test-verifiers"),
    ],
)
def test_what_fails_is_shown_beside_what_ran_with_it(
    tmp_path: Path, fail: str, code: int, last: str
):
    said, _ = (process := started(tmp_path, fail)).communicate()
    assert process.returncode == code, said
    targets = [line.removeprefix("said by ") for line in said.splitlines() if "said by " in line]
    assert targets[-1] == last and {"docs", "check"} <= {*targets}
    assert ("test-sglang" in targets) == (last.startswith("test-v") and fail != "test-peers")
    assert ("=== NO VERIFIERS" in said) == (fail == ".venv-verifiers/.installed")
    assert not [*tmp_path.glob("tmp.*")]


def test_what_comes_too_late_is_left_out_and_said(tmp_path: Path):
    said, _ = (process := started(tmp_path, CI_MINUTES="0")).communicate()
    assert process.returncode == 0, said
    left_out = [line.split()[4].rstrip(":") for line in said.splitlines() if "TOO LATE" in line]
    assert {"docs", "check", "test-vllm", "test-verifiers", "test-sglang"} <= {*left_out}
    assert "said by test-slow" in said and "said by test-vllm" not in said


@pytest.mark.parametrize(
    ("stays", "number", "to"),
    [
        ("check browser", signal.SIGINT, os.killpg),  # as a terminal does
        ("docs browser", signal.SIGTERM, os.killpg),
        ("test-vllm test-peers", signal.SIGINT, os.killpg),
        ("test-vllm test-peers", signal.SIGTERM, os.kill),
    ],
)
def test_what_is_told_to_end_leaves_no_process(
    tmp_path: Path, stays: str, number: signal.Signals, to: Callable[[int, int], None]
):
    process = started(tmp_path, stay=stays)
    told = [tmp_path / name for name in stays.split()]

    def there() -> list[int]:
        """The ids of the living processes that make has started."""
        written = "".join(file.read_text() for file in told if file.exists())
        return [*filter(is_alive, map(int, written.split()))]

    wait_until(lambda: len(there()) == len(told), there, process)
    to(process.pid, number)
    process.communicate()
    assert process.returncode != 0
    wait_until(lambda: not there(), there)
