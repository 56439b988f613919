"""What a tracker is handed: every record once, over stops, kills and resumptions; and one of the user's own."""

import json
import subprocess
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from helpers.commands import full_disk, refused, run_here
from helpers.paths import ROOT

from areal_q.cli.track import main as track
from areal_q.config import PythonTracker, Wandb, load, parse
from areal_q.config.trackers import labelled
from areal_q.errors import ConfigError, installing
from areal_q.observability.metrics_log import MetricsLog, Record, read_metrics, truncate_after
from areal_q.observability.trackers.described import describe, keep_commit, numbers, samples
from areal_q.observability.trackers.feed import Feed, Logged
from areal_q.system.run_dir import flat, with_absolute_files, with_digests

LINES = """
    import json

    def tracker(run, path):
        def log(record):
            with open(path, "a") as file:
                file.write(json.dumps(record) + "\\n")
        return log
"""


class Fake:
    """Keeps what it is given, forgets it if it `forgets`, and dies at the record `dies_at`."""

    def __init__(self, forgets: bool = False, dies_at: int = -1) -> None:
        self.taken: list[Record] = []
        self.rewound: list[int] = []
        self.forgets, self.dies_at = forgets, dies_at

    def log(self, record: Record) -> None:
        if len(self.taken) == self.dies_at:
            raise OSError("No space left on device")
        self.taken.append(record)

    def rewind(self, step: int) -> int | None:
        self.rewound.append(step)
        if not self.forgets:
            return None
        self.taken = [record for record in self.taken if record["step"] <= step]
        return step

    def finish(self, report: Path | None, reason: str) -> None: ...


@pytest.fixture
def run_dir(write_run, tmp_path):
    return write_run(tmp_path / "demo", 6)


def feed(run_dir: Path, tracker: Fake) -> Feed:
    return Feed(run_dir, tracker, Logged(run_dir / "logged"))


def records_of(run_dir: Path) -> list[Record]:
    return read_metrics(run_dir / "metrics.jsonl")


def resumed(run_dir: Path, after: int, until: int) -> None:
    """Makes of a run what a resumption from the checkpoint of step `after` does."""
    truncate_after(run_dir / "metrics.jsonl", after)
    with MetricsLog(run_dir, tensorboard=False) as log:
        for step in range(after + 1, until + 1):
            log.write("step", step, {"reward/mean": 100.0 + step})
        log.write("end", until, {}, reason="done")


def test_each_record_is_handed_on_once_and_as_it_is(run_dir):
    tracker = Fake()
    follower = feed(run_dir, tracker)
    assert follower.pass_on() == len(records_of(run_dir))
    assert follower.pass_on() == feed(run_dir, tracker).pass_on() == 0
    assert tracker.taken == records_of(run_dir)
    assert follower.end and follower.end["reason"] == "done"


@pytest.mark.parametrize("died_at", range(9))
def test_a_tracker_that_died_goes_on_where_it_was(run_dir, died_at):
    tracker = Fake(dies_at=died_at)
    with pytest.raises(OSError):
        feed(run_dir, tracker).pass_on()
    tracker.dies_at = -1
    feed(run_dir, tracker).pass_on()
    assert tracker.taken == records_of(run_dir)


def test_a_line_torn_by_kill_9_is_handed_on_again(run_dir):
    feed(run_dir, Fake()).pass_on()
    logged = run_dir / "logged"
    logged.write_bytes(logged.read_bytes()[:-5])
    again = Fake()
    assert feed(run_dir, again).pass_on() == 1
    assert again.taken == records_of(run_dir)[-1:]
    assert feed(run_dir, again).pass_on() == 0


@pytest.mark.parametrize("while_it_follows", [True, False])
def test_steps_written_anew_are_not_logged_twice(run_dir, while_it_follows):
    before, tracker = records_of(run_dir), Fake()
    follower = feed(run_dir, tracker)
    follower.pass_on()
    resumed(run_dir, 3, 8)
    if not while_it_follows:
        follower = feed(run_dir, tracker)
    follower.pass_on()
    assert tracker.rewound[-1] == 3 and follower.kept_back == 3
    taken = [r for r in tracker.taken if r["kind"] == "step"]
    kept = [r for r in before if r["kind"] == "step"]
    assert taken[:6] == kept
    assert [(r["step"], r["reward/mean"]) for r in taken[6:]] == [(7, 107.0), (8, 108.0)]
    assert feed(run_dir, tracker).pass_on() == 0


@pytest.mark.parametrize("while_it_follows", [True, False])
def test_a_tracker_that_forgets_has_what_was_learnt(run_dir, while_it_follows):
    tracker = Fake(forgets=True)
    follower = feed(run_dir, tracker)
    follower.pass_on()
    resumed(run_dir, 3, 8)
    (follower if while_it_follows else feed(run_dir, tracker)).pass_on()
    assert tracker.taken == records_of(run_dir)
    resumed(run_dir, 0, 2)
    feed(run_dir, tracker).pass_on()
    assert tracker.taken == records_of(run_dir)


def test_an_end_that_a_resumption_takes_back_rewinds_nothing(run_dir):
    tracker = Fake()
    feed(run_dir, tracker).pass_on()
    resumed(run_dir, 6, 8)
    follower = feed(run_dir, tracker)
    follower.pass_on()
    assert (tracker.rewound, follower.kept_back) == ([], 0)
    assert [r["step"] for r in tracker.taken if r["kind"] == "step"] == [*range(1, 9)]


def test_several_evaluations_of_a_step_are_all_handed_on(tmp_path):
    tracker = Fake()
    with MetricsLog(tmp_path, tensorboard=False) as log:
        log.write("eval", 5, {"eval/accuracy": 0.5})
        log.write("eval", 5, {"eval/other": 0.25})
    feed(tmp_path, tracker).pass_on()
    assert len(tracker.taken) == 2


def test_numbers_are_the_metrics_of_steps_and_evaluations(run_dir):
    for record in records_of(run_dir):
        found = numbers(record)
        if record["kind"] not in ("step", "eval"):
            assert found == {}
            continue
        assert found.pop("elapsed_s") == record["elapsed_s"]
        assert found == {k: v for k, v in record.items() if "/" in k and v is not None}
    assert samples(records_of(run_dir)[0]) == [["1+1=", "2", "3", False]]


# A disk that is full


@pytest.mark.parametrize("nbytes", range(0, 200, 9))
def test_a_full_disk_costs_no_record_and_repeats_one_at_most(run_dir, nbytes):
    """The list of what was taken ends within a line, or between two."""
    tracker = Fake()
    with full_disk(nbytes), pytest.raises(OSError, match="File too large"):
        feed(run_dir, tracker).pass_on()
    taken = len(tracker.taken)
    assert feed(run_dir, tracker).pass_on() == len(records_of(run_dir)) - taken + 1
    assert tracker.taken[:taken] + tracker.taken[taken + 1 :] == records_of(run_dir)


def test_a_full_disk_at_a_resumption_changes_nothing(run_dir):
    tracker = Fake(forgets=True)
    feed(run_dir, tracker).pass_on()
    resumed(run_dir, 3, 8)
    with full_disk(9), pytest.raises(OSError, match="File too large"):
        feed(run_dir, tracker).pass_on()
    feed(run_dir, tracker).pass_on()
    assert tracker.taken == records_of(run_dir)


def test_a_full_disk_leaves_no_tracker_without_an_id(run_dir):
    settings = PythonTracker(path="x.py")
    with full_disk(0), pytest.raises(OSError, match="File too large"):
        describe(parse("", "x"), run_dir, "python", settings, "1")
    assert len(describe(parse("", "x"), run_dir, "python", settings, "1").id) == 32


def test_a_tracker_whose_disk_is_full_says_so_and_goes_on_later(run_dir, tmp_path):
    file, out = own(tmp_path, LINES), tmp_path / "lines"
    out.symlink_to("/dev/full")
    args = [str(run_dir), f"path={file}", f'settings={{path="{out}"}}', "--to", "python"]
    refused(run_here("track", track, *args), str(file), "No space left on device")
    out.unlink()
    count = len(records_of(run_dir))
    assert (
        run_here("track", track, *args).stdout
        == f"python: {count} records of demo, {count} in all\n"
    )


# A tracker of one's own, by the command


def own(tmp_path: Path, code: str, *settings: str) -> Path:
    (tmp_path / "mine.py").write_text(dedent(code))
    return tmp_path / "mine.py"


def test_code_of_ones_own_takes_every_record(run_dir, tmp_path):
    file = own(tmp_path, LINES)
    out = tmp_path / "lines"
    settings = f'settings={{path="{out}"}}'
    done = run_here("track", track, str(run_dir), f"path={file}", settings, "--to", "python")
    assert (done.returncode, done.stderr) == (0, "")
    count = len(records_of(run_dir))
    assert done.stdout == f"python: {count} records of demo, {count} in all\n"
    copied = tmp_path / "copied"
    copied.mkdir()
    out.rename(copied / "metrics.jsonl")
    assert records_of(copied) == records_of(run_dir)
    again = run_here("track", track, str(run_dir), f"path={file}", settings, "--to", "python")
    assert again.stdout == f"python: 0 records of demo, {count} in all\n" and not out.exists()
    anew = ("--to", "python", "--anew")
    assert run_here(
        "track", track, str(run_dir), f"path={file}", settings, *anew
    ).stdout.startswith(f"python: {count} records")


def test_the_tracker_of_the_docs_page_does_what_it_says(run_dir, tmp_path):
    page = (ROOT / "docs" / "trackers.md").read_text()
    file = own(tmp_path, page.partition("```python\n")[2].partition("```")[0])
    settings = (f"path={file}", "settings.every=3", "--to", "python")
    assert run_here("track", track, str(run_dir), *settings).returncode == 0
    lines = [json.loads(line) for line in (run_dir / "steps.jsonl").read_text().splitlines()]
    rewards = {r["step"]: r["reward/mean"] for r in records_of(run_dir) if r["kind"] == "step"}
    assert lines == [{"step": step, "reward": rewards[step]} for step in (3, 6)]
    toml = page.partition("```toml\n")[2].partition("```")[0]
    assert list(labelled(parse(toml, "page").trackers)) == ["wandb", "mlflow", "trackio", "python"]


def test_an_error_of_ones_own_names_file_and_line(run_dir, tmp_path):
    file = own(tmp_path, "def tracker(run):\n    return lambda record: record['nothing']\n")
    done = run_here("track", track, str(run_dir), f"path={file}", "--to", "python")
    refused(done, f"{file}:2", "KeyError: 'nothing'")
    file = own(tmp_path, "def tracker(run):\n    return 7\n")
    refused(
        run_here("track", track, str(run_dir), f"path={file}", "--to", "python"), f"{file}:1", "int"
    )


def test_it_is_told_of_the_run_and_may_forget_and_finish(run_dir, tmp_path):
    code = """
        class tracker:
            def __init__(self, run, out):
                self.out = out
                self.say(run.name, run.settings["seed"], run.directory.name, run.scratch.is_dir(), len(run.id))
            def say(self, *words):
                with open(self.out, "a") as file:
                    print(*words, file=file)
            def __call__(self, record): self.say(record["kind"], record["step"])
            def rewind(self, step): self.say("back to", step)
            def finish(self, reason): self.say("ends", reason)
    """
    out = tmp_path / "out"
    args = [f"path={own(tmp_path, code)}", f'settings={{out="{out}"}}', "--to", "python"]
    run_here("track", track, str(run_dir), *args)
    resumed(run_dir, 5, 6)
    run_here("track", track, str(run_dir), *args)
    said = out.read_text().splitlines()
    first = [
        "demo 0 demo True 32",
        "eval 0",
        *[f"step {n}" for n in range(1, 7)],
        "eval 6",
        "end 6",
    ]
    again = ["demo 0 demo True 32", "back to 5", "step 6", "end 6", "ends done"]
    assert said == [*first, "ends done", *again]


# Settings, and what the command refuses


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "its settings name no trackers; --to wandb, for one"),
        (
            ["--to", "wandbb"],
            "--to wandbb: no such choice; did you mean 'wandb'? It is one of wandb",
        ),
        (
            ["--to", "wandb", "projct=a"],
            "trackers[0].projct: no such setting; did you mean trackers[0].project?",
        ),
        (["--to", "wandb", "mode=now"], "trackers[0].mode = 'now'"),
        (["project=a"], "project=a: of which tracker? --to NAME"),
        (["--to", "mlflow", "uri=http://me:secret@host"], "the uri of mlflow holds a password"),
        (["--to", "python", "path=none.py"], "none.py: no such Python file"),
    ],
)
def test_a_mistake_is_one_line(run_dir, arguments, complaint):
    done = run_here("track", track, str(run_dir), *arguments)
    refused(done, complaint)
    assert "secret" not in done.stderr


def test_a_missing_package_is_named_with_its_extra(run_dir, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    done = run_here("track", track, str(run_dir), "--to", "trackio")
    refused(done, f"type = 'trackio' needs trackio: {installing('trackio')}")


def test_a_run_is_handed_to_a_tracker_by_one_process(run_dir, tmp_path):
    file = own(tmp_path, f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from helpers.commands import run_here
        from areal_q.cli.track import main

        def tracker(run):
            args = [str(run.directory), "path=x.py", "--to", "python"]
            print(run_here("track", main, *args).stderr)
            return lambda record: None
    """)  # fmt: skip
    done = run_here("track", track, str(run_dir), f"path={file}", "--to", "python")
    assert "another process hands this run to python" in done.stdout


def test_trackers_of_one_type_have_labels_of_their_own():
    text = 'trackers=[{type="wandb"}, {type="wandb", project="b"}, {type="python", path="a.py"}]'
    found = labelled(load(None, [text]).trackers)
    assert list(found) == ["wandb", "wandb-2", "python"]
    assert found["wandb-2"] == Wandb(project="b")


def test_own_code_is_named_from_anywhere_and_hashed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = own(tmp_path, LINES)
    run = load(None, ['trackers=[{type="wandb"}, {type="python", path="mine.py"}]'])
    kept = with_digests(with_absolute_files(run)).trackers[1]
    assert isinstance(kept, PythonTracker) and kept.path == str(file) and len(kept.digest) == 32
    file.write_text(file.read_text() + "\n# changed\n")
    changed = with_digests(with_absolute_files(run)).trackers[1]
    assert isinstance(changed, PythonTracker) and changed.digest != kept.digest
    file.unlink()
    with pytest.raises(ConfigError.__bases__[0], match=r"mine\.py"):
        with_digests(run)


def test_the_commit_is_that_of_the_directory_with_its_changes(tmp_path, monkeypatch):
    def git(*words: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b"]
        return subprocess.run(
            ["git", *who, *words], capture_output=True, text=True, check=True
        ).stdout

    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    kept: Any = tmp_path / "commit"
    keep_commit(tmp_path)
    assert not kept.exists()
    git("init", "-q")
    (tmp_path / "file").write_text("a")
    git("add", "file")
    git("commit", "-qm", "one")
    keep_commit(tmp_path)
    assert kept.read_text() == git("rev-parse", "HEAD")
    (tmp_path / "file").write_text("b")
    keep_commit(tmp_path)
    assert kept.read_text().strip() == git("rev-parse", "HEAD").strip() + "+changes"


def test_settings_are_told_as_they_are(write_run, tmp_path):
    directory = write_run(tmp_path / "other", 1, "learner.max_lag=7")
    out = tmp_path / "out"
    code = f"""
        def tracker(run):
            with open({str(out)!r}, "w") as file:
                file.write(str(run.settings["learner"]["max_lag"]))
            return print
    """
    run_here("track", track, str(directory), f"path={own(tmp_path, code)}", "--to", "python")
    assert out.read_text() == "7" == str(flat({"a": {"b": 7}})["a.b"])
