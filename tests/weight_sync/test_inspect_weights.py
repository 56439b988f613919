"""`areal-q weights`: what is listed, verified and followed is what was published."""

import json
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from helpers.weight_sync import Proxy, WeightSync
from typer.testing import CliRunner, Result

from areal_q import messages
from areal_q.config import BroadcastConfig, dump_toml, load
from areal_q.errors import ConfigError, WeightVersionError
from areal_q.messages import ChunkReply, ManifestReply, WorkerStatus
from areal_q.observability.metrics_log import MetricsLog
from areal_q.weights import delta
from areal_q.weights.version import WeightVersion
from bench.records import make_beat
from buffer.weight_sync.client import WeightClient
from buffer.weight_sync.commands.inspect_weights import main

CONFIG = BroadcastConfig(heartbeat_s=0.05, hold=2, hold_deltas=3)


@pytest.fixture
def run(tmp_path: Path, sync: WeightSync) -> Path:
    """The directory of a run whose learner serves at the endpoints of `sync`."""
    ends = [f'broadcast.{kind}="{end}"' for kind, end in sync.at()._asdict().items()]
    directory = tmp_path / "run"
    directory.mkdir()
    (directory / "config.toml").write_text(dump_toml(load(None, ends)))
    return directory


def command(*arguments: object) -> Result:
    """In this process: a start of the real command imports torch."""
    app = typer.Typer()
    app.command()(main)
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


def listed(*arguments: object) -> list[dict[str, Any]]:
    result = command(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def test_versions_are_listed_with_their_sizes_and_deltas(run: Path, sync: WeightSync) -> None:
    versions = [sync.publish(number) for number in range(5)]
    rows = listed(run)
    assert [row["version"] for row in rows] == [2, 3, 4]
    assert [row["digest"] for row in rows] == [v.manifest.digest for v in versions[2:]]
    assert [row["whole"] for row in rows] == [False, True, True]
    for row, old, new in zip(rows, versions[1:], versions[2:], strict=False):
        assert row["delta_bytes"] == len(delta.diff(old, new) or b"")
        assert row["bytes"] == new.manifest.nbytes
    assert listed("--fetch", sync.server.endpoints.fetch)[-1]["version"] == 4
    text = command(run).stdout
    assert text.splitlines()[0].split()[:2] == ["version", "digest"] and "int8" in text


def test_weights_of_another_run_are_not_shown_as_its_own(run: Path, sync: WeightSync) -> None:
    sync.publish(0, run_id="first")
    (run / "run-id").write_text("first\n")
    assert listed(run)[-1]["version"] == 0
    (run / "run-id").write_text("second\n")
    with pytest.raises(ConfigError, match="its endpoint is that of another run now"):
        command(run)


def test_what_changed_is_told_by_tensor(run: Path, sync: WeightSync) -> None:
    old, new = sync.publish(0), sync.publish(1)
    for row in listed(run, "--tensors"):
        differs = old.tensors[row["tensor"]] != new.tensors[row["tensor"]]
        assert (row["changed"], row["of"]) == (int(differs.sum()), differs.numel())


def beat(name: str, version: WeightVersion | None, number: int | None = None) -> WorkerStatus:
    known = version.manifest if version else None
    number = number if number is not None else known.version if known else -1
    return make_beat(name, version=number, digest=known.digest if known else "")


def test_a_worker_with_other_bytes_than_published_is_found(run: Path, sync: WeightSync) -> None:
    versions = [sync.publish(number) for number in range(3)]
    good = [beat("a", versions[2]), beat("b", versions[1]), beat("new", None)]
    with MetricsLog(run, tensorboard=False) as log:
        log.write("step", 1, {}, workers=good)
        rows = listed(run, "--verify")
        assert [(r["worker"], r["verdict"], r["behind"]) for r in rows] == [
            ("a", "same", 0),
            ("b", "same", 1),
            ("new", "unknown", 3),
        ]
        log.write("step", 2, {}, workers=[*good, beat("liar", versions[1], number=2)])
    result = command(run, "--verify")
    assert result.exit_code == 1
    assert next(line for line in result.stdout.splitlines() if "OTHER" in line).startswith("liar")


def test_new_versions_are_followed_live(run: Path, sync: WeightSync) -> None:
    sync.publish(0)
    program = [sys.executable, "-m", "areal_q", "weights"]
    process = subprocess.Popen(
        [*program, str(run), "--follow", "--json"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    sync.stack.callback(process.stdout.close)
    sync.stack.callback(process.wait)
    sync.stack.callback(process.kill)
    assert json.loads(process.stdout.readline())[0]["version"] == 0
    for number in range(1, 4):
        version = sync.publish(number)
        (row,) = json.loads(process.stdout.readline())
        assert (row["version"], row["base"]) == (number, number - 1)
        assert row["digest"] == version.manifest.digest
        assert 0 < row["delta_bytes"] < 1000 and row["share"].endswith("%")
    process.send_signal(signal.SIGINT)
    process.wait()


LIES = {
    "no reply": (b"\xff", "record refused"),
    "another reply": (
        messages.encode(ChunkReply(digest="d", offset=0, nbytes=0)),
        "ChunkReply is no answer",
    ),
    "no manifest": (
        messages.encode(ManifestReply(manifest=b"\xff", checksum="0")),
        "record refused",
    ),
}


@pytest.mark.parametrize("lie", LIES)
def test_what_is_no_answer_is_named(sync: WeightSync, lie: str) -> None:
    sync.publish(0)
    proxy = Proxy(sync)
    answer, said = LIES[lie]
    proxy.tamper_fetch = lambda frames: [[answer]]
    refused = pytest.raises(WeightVersionError, match=f"ipc://.*{said}")
    with closing(WeightClient(*proxy.endpoints, None)) as client, refused:
        client.manifest()


def test_a_piece_of_another_size_ends_the_question(run: Path, sync: WeightSync) -> None:
    """It would be asked for the rest without end, or a delta be read that is none."""
    sync.publish(0, 1)
    proxy = Proxy(sync)
    with closing(WeightClient(*proxy.endpoints, None)) as client:
        base = client.held().versions[-2]
        assert client.changes(base)
        for change in (lambda piece: b"", lambda piece: piece[:-1], lambda piece: piece + b"x"):
            proxy.tamper_fetch = lambda frames, change=change: [
                [frames[0], *map(change, frames[1:])]
            ]
            with pytest.raises(WeightVersionError, match=r"a piece of a delta is not \d+ bytes"):
                client.changes(base)


def test_what_is_no_announcement_is_left_out(sync: WeightSync) -> None:
    sync.publish(0)
    proxy = Proxy(sync)
    proxy.tamper_announce = lambda frames: [[b"\xff"], [b""], frames]
    with closing(WeightClient(*proxy.endpoints, None)) as client:
        assert next(client.follow())[0].version == 0


@pytest.mark.timeout(60)
def test_nobody_there_is_said_after_a_while(short_dir: Path) -> None:
    with pytest.raises(WeightVersionError, match="no answer for 5 s"):
        command("--fetch", f"ipc://{short_dir}/nobody")


def test_what_cannot_be_used_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path / "missing")]):
        with pytest.raises(ConfigError):
            command(*arguments)
    process = [sys.executable, "-m", "areal_q", "weights"]
    result = subprocess.run(process, capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (2, "areal-q: error: RUN is needed\n")
