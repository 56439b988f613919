"""Ids of the Hub stand for directories of Hugging Face's cache, here one that is filled by hand, offline."""

import errno
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from areal_q.checks.hub import directory_of, fetched
from areal_q.config import load
from areal_q.errors import ConfigError

hub = pytest.importorskip("huggingface_hub.constants")
COMMITS = {"main": "a" * 40, "v2": "b" * 40}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with two revisions of one model."""
    of_model = tmp_path / "hub" / "models--org--tiny-1.5"
    for name, commit in COMMITS.items():
        (of_model / "snapshots" / commit).mkdir(parents=True)
        (of_model / "snapshots" / commit / "config.json").write_text("{}")
        (of_model / "refs").mkdir(exist_ok=True)
        (of_model / "refs" / name).write_text(commit)
    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", True)
    return of_model


@pytest.mark.parametrize(
    ("id", "commit"),
    [("org/tiny-1.5", "main"), ("org/tiny-1.5@v2", "v2"), (f"org/tiny-1.5@{'b' * 40}", "v2")],
)
def test_an_id_is_a_directory_named_after_its_commit(cache: Path, id: str, commit: str) -> None:
    found = Path(directory_of(id, "model.path"))
    assert found == cache / "snapshots" / COMMITS[commit]


def test_every_model_of_the_settings_may_be_an_id(cache: Path, tmp_path: Path) -> None:
    named = "{type='pretrained', path='org/tiny-1.5'}"
    teacher = "{type='model', path='org/tiny-1.5@v2'}"
    run = load(None, [f"model={named}", f"learner.teacher={teacher}"])
    here = fetched(run)
    assert here.model.path == str(cache / "snapshots" / COMMITS["main"])  # type: ignore[union-attr]
    assert here.learner.teacher.path == str(cache / "snapshots" / COMMITS["v2"])  # type: ignore[union-attr]
    assert fetched(here) == here
    own = load(None, [f"model={{type='pretrained', path='{tmp_path}'}}"])
    assert fetched(own) == own


def test_another_host_s_cache_is_fetched_by_its_name(cache: Path) -> None:
    elsewhere = f"/home/them/hub/models--org--tiny-1.5/snapshots/{COMMITS['v2']}"
    assert directory_of(elsewhere, "model.path") == str(cache / "snapshots" / COMMITS["v2"])


@pytest.mark.parametrize("id", ["org/absent", "org/tiny-1.5@v3"])
def test_what_cannot_be_fetched_is_named_in_a_line(cache: Path, id: str) -> None:
    with pytest.raises(ConfigError, match=r"^model\.path: .* hf download ID --local-dir DIR$") as e:
        directory_of(id, "model.path")
    assert id.partition("@")[0] in str(e.value) and "\n" not in str(e.value)
    assert "no network reaches huggingface.co; where" in str(e.value)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """A Hub that answers with the status of the table, in place of the one on the network."""
    answer = {"status": 404}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(answer["status"])
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    monkeypatch.setattr(hub, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        threading.Thread(target=server.serve_forever).start()
        here = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(hub, "ENDPOINT", here)
        monkeypatch.setattr("huggingface_hub.hf_api.api.endpoint", here)
        yield answer
        server.shutdown()


@pytest.mark.parametrize("status", [401, 403, 404])
def test_a_refusal_of_the_hub_is_no_missing_network(asked: dict[str, int], status: int) -> None:
    asked["status"] = status
    with pytest.raises(ConfigError, match=rf"^model\.path: org/absent: .*\b{status} ") as e:
        directory_of("org/absent", "model.path")
    assert "network" not in str(e.value) and "\n" not in str(e.value)


@pytest.mark.parametrize("id", ["a--b/c", "org/tiny-1.5"])
def test_what_the_disk_or_the_client_refuses_is_said(
    cache: Path, monkeypatch: pytest.MonkeyPatch, id: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if "--" not in id:  # a name that the client refuses
        monkeypatch.setattr("huggingface_hub.snapshot_download", full)
    with pytest.raises(ConfigError, match=r"from the Hub: .*(No space left|'a--b/c')") as e:
        directory_of(id, "model.path")
    assert "network" not in str(e.value)


@pytest.mark.parametrize("path", ["nowhere", "/nowhere/at/all", "a/b/c"])
def test_a_path_that_is_no_id_stays_as_it_is(cache: Path, path: str) -> None:
    assert directory_of(path, "model.path") == path
