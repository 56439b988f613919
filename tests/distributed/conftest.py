"""Ranks of a learner that take steps."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from helpers.ranks import RankServer

from areal_q.config import Run, dump_toml
from areal_q.system.ports import free_ports
from learner.backends.messages import Piece
from learner.data.packing import Sample


@pytest.fixture(scope="session")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


@pytest.fixture
def on_ranks(
    tmp_path: Path, rank_server: RankServer
) -> Callable[..., list[tuple[list[dict[str, float]], str]]]:
    """on_ranks(2, {directory: (run, steps)}) lets two processes take the steps of each job, one job after the
    other, from its checkpoint if it has one; leaves a checkpoint of step 9 in each. Returns the metrics of the
    steps and the digest of the version that would be published then, by job."""

    def run_all(size: int, jobs: dict[Path, tuple[Run, list[list[Sample]]]]):
        for directory, (run, steps) in jobs.items():
            directory.mkdir(exist_ok=True)
            (directory / "config.toml").write_text(dump_toml(run))
            pieces = [[Piece.of(sample) for sample in samples] for samples in steps]
            (directory / "samples").write_bytes(msgspec.msgpack.encode(pieces))
        logs = [tmp_path / f"rank-{rank}.log" for rank in range(size)]
        codes = rank_server.take_steps(dict(zip(jobs, free_ports(len(jobs)), strict=True)), logs)
        said = [log.read_text()[-3000:] for log, code in zip(logs, codes, strict=True) if code]
        assert not said, said
        return [tuple(json.loads((directory / "found.json").read_text())) for directory in jobs]

    return run_all
