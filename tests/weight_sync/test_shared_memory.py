"""Workers of the learner's host read a payload where it lies; all others, and all doubts, go by the socket."""

import os
import subprocess
import sys

import msgspec
import pytest
import torch
from helpers.weight_sync import LOOPBACK, WeightSync, arrive

from areal_q.config import BroadcastConfig
from areal_q.messages import ChunkReply, FetchChunk, FetchManifest, ManifestReply, SharedFile
from areal_q.weights import shared_memory
from areal_q.weights.shared_memory import SharedReader
from areal_q.weights.version import PayloadPool, WeightVersion

CONFIG = BroadcastConfig(chunk_bytes=1000, timeout_s=1.0)
READ = """
import os, sys
path, nbytes = sys.argv[1], int(sys.argv[2])
sys.stdout.buffer.write(os.pread(os.open(path, os.O_RDONLY), nbytes, 0))
"""


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each piece that was read in shared memory."""
    seen: list[int] = []
    read_into = SharedReader.read_into

    def read_and_note(self: SharedReader, place: memoryview, offset: int) -> int:
        seen.append(len(place))
        return read_into(self, place, offset)

    monkeypatch.setattr(SharedReader, "read_into", read_and_note)
    return seen


def publish(sync: WeightSync, number: int, *, rows: int = 300) -> WeightVersion:
    return sync.publish(number, rows=rows, pool=PayloadPool(shared=True))


def file_of(version: WeightVersion) -> SharedFile:
    file = shared_memory.file_of(version.payload)
    assert file is not None
    return file


def test_another_process_reads_the_very_bytes(make_version) -> None:
    version = make_version(1, pool=PayloadPool(shared=True))
    file = file_of(version)
    path = f"/proc/{file.pid}/fd/{file.fd}"
    command = [sys.executable, "-c", READ, path, str(version.manifest.nbytes)]
    found = subprocess.run(command, capture_output=True, check=True).stdout
    assert found == version.payload.numpy().tobytes()


def test_memory_used_again_before_it_was_forgotten_stays_known() -> None:
    """Its file was lost to other processes, and its descriptor was never closed."""
    payload = shared_memory.allocate(10)
    file, late = shared_memory.file_of(payload), os.open(os.devnull, os.O_RDONLY)
    shared_memory._forget(payload.data_ptr(), late)  # of what had the address before
    assert file is not None and shared_memory.file_of(payload) == file
    address = payload.data_ptr()
    del payload
    assert address not in shared_memory._files
    for gone in (late, file.fd):
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(gone)


def test_a_worker_of_the_host_reads_in_place(sync: WeightSync, reads: list[int]) -> None:
    subscriber = sync.follow()
    version = publish(sync, 1, rows=20_000)
    arrive(subscriber, version)
    assert sum(reads) == version.manifest.nbytes and len(reads) > 1
    assert subscriber.stats.fetch.fetched_bytes == version.manifest.nbytes


def test_a_chunk_to_be_read_in_place_has_no_bytes(sync: WeightSync) -> None:
    version = publish(sync, 1)
    told = sync.ask(FetchManifest())
    assert isinstance(told, ManifestReply) and told.shared == file_of(version)
    request = FetchChunk(digest=version.manifest.digest, offset=0, nbytes=100, shared=True)
    answer = sync.ask(request)
    assert isinstance(answer, ChunkReply) and answer.shared


@pytest.mark.parametrize("fault", ["altered", "cut short"])
def test_what_reads_wrong_in_place_comes_by_socket(
    sync: WeightSync, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    def read_wrong(self: SharedReader, place: memoryview, offset: int) -> int:
        place[:] = bytes(len(place))
        return len(place) - (fault == "cut short")

    monkeypatch.setattr(SharedReader, "read_into", read_wrong)
    subscriber = sync.follow()
    arrive(subscriber, publish(sync, 1))
    assert subscriber.stats.fetch.mismatches == 1


@pytest.mark.parametrize("where", ["another file", "a process that is gone"])
def test_memory_that_cannot_be_opened_comes_by_socket(
    sync: WeightSync, reads: list[int], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def file_elsewhere(payload: torch.Tensor) -> SharedFile:
        other = {
            "another file": {"name": f"areal-q-{0:032x}"},
            "a process that is gone": {"pid": 0},
        }
        return msgspec.structs.replace(file_of_payload(payload), **other[where])

    file_of_payload = lambda payload: shared_memory._files[payload.data_ptr()]  # noqa: E731
    monkeypatch.setattr(shared_memory, "file_of", file_elsewhere)
    subscriber = sync.follow()
    arrive(subscriber, publish(sync, 1))
    assert not reads and subscriber.stats.fetch.mismatches == 0


def test_a_worker_of_the_host_reads_in_place_over_tcp(sync: WeightSync, reads: list[int]) -> None:
    sync.server = sync.serve(LOOPBACK)
    version = publish(sync, 1)
    arrive(sync.follow(), version)
    assert sum(reads) == version.manifest.nbytes


def test_a_payload_that_nobody_views_closes_its_file() -> None:
    payload = PayloadPool(spare=0, shared=True).lend(5000)
    file = shared_memory.file_of(payload)
    assert file is not None
    view = payload[1000:].view(torch.int8)
    del payload
    assert os.readlink(f"/proc/self/fd/{file.fd}").startswith(f"/memfd:{file.name}")
    view.fill_(7)
    del view
    assert file not in shared_memory._files.values()
    with pytest.raises(OSError, match=r".*"):
        SharedReader(file)
