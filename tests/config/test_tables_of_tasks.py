"""Tables of tasks by name, of a mixture and of evaluation sets: paths, hashes, what a resumption may change."""

from pathlib import Path

import msgspec
import pytest

from areal_q.config import Jsonl, Run, dump_toml, load, parse, workers_hash
from areal_q.errors import ConfigError, SettingsError, TaskError
from areal_q.system.run_dir import claimed, resumed, with_absolute_files, with_digests

MINE = "def problems():\n    return [('1=', '1')] * 9\n\ndef reward(response):\n    return 1.0\n"


@pytest.fixture
def mixed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Settings with relative paths of a mixture and an evaluation set."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(MINE)
    Path("judge.py").write_text(MINE)
    Path("rows.jsonl").write_text('{"prompt": "1=", "answer": "1"}\n')
    return [
        "task.type=mix",
        'task.sources.a={task={type="python", path="mine.py"}}',
        'task.sources.b={task={type="jsonl", path="rows.jsonl", heldout="rows.jsonl"}, weight=2,'
        ' reward={path="judge.py"}}',
        'eval.sets.more={task={type="jsonl", path="rows.jsonl"}, samples=2}',
        'eval.sets.own={task={type="python", path="mine.py"}}',
    ]


@pytest.mark.parametrize(
    ("toml", "instead"),
    [
        ('[[eval]]\nname = "a"', "[eval.sets.NAME] (docs/data.md)"),
        ('eval.sets = ["a.jsonl", "b.jsonl"]', "[eval.sets.NAME] (docs/data.md)"),
        ('task = [{type = "math"}]', "[task.sources.NAME] (docs/data.md)"),
    ],
)
def test_a_list_of_tables_is_told_what_to_be_instead(toml: str, instead: str):
    with pytest.raises(ConfigError, match="must be a table; ") as refused:
        parse(toml, "page")
    assert str(refused.value).endswith(instead)


def test_a_table_of_tasks_survives_its_file(mixed: list[str]):
    run = load(None, mixed)

    assert parse(dump_toml(run), "again") == run
    assert run.sources == ("a", "b", "more", "own")


def test_every_file_is_made_absolute_and_own_code_hashed(mixed: list[str], tmp_path: Path):
    run = with_digests(with_absolute_files(load(None, mixed)))

    found = msgspec.to_builtins(run)
    a, b = found["task"]["sources"]["a"], found["task"]["sources"]["b"]
    sets = found["eval"]["sets"]
    assert a["task"]["path"] == sets["own"]["task"]["path"] == f"{tmp_path}/mine.py"
    assert b["task"]["path"] == b["task"]["heldout"] == f"{tmp_path}/rows.jsonl"
    assert sets["more"]["task"]["path"] == f"{tmp_path}/rows.jsonl"
    assert b["reward"]["path"] == f"{tmp_path}/judge.py"
    assert all(it["digest"] for it in (a["task"], b["reward"], sets["own"]["task"]))


def test_models_and_keys_are_made_absolute(tmp_path: Path, monkeypatch):
    """A resume from another directory found no reference, and a job elsewhere no keys."""
    monkeypatch.chdir(tmp_path)
    for name in ("ref", "keys"):
        Path(name).mkdir()
    run = load(None, ["learner.reference_kl={path='ref'}", "broadcast.keys=keys"])
    run = with_absolute_files(run)
    assert run.learner.reference_kl and run.learner.reference_kl.path == f"{tmp_path}/ref"
    assert run.broadcast.keys == f"{tmp_path}/keys"


def test_a_file_of_a_set_that_is_missing_is_named(mixed: list[str]):
    Path("mine.py").unlink()
    with pytest.raises(TaskError, match=r"mine\.py"):
        with_digests(load(None, mixed))


def test_a_set_with_a_file_has_the_task_of_the_run(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("more.jsonl").write_text("")
    run = load(
        None, ['task={type="jsonl", path="x", prompt="q"}', "eval.sets.more.path=more.jsonl"]
    )

    more = with_absolute_files(run).of("more").task
    assert isinstance(more, Jsonl)
    assert (more.path, more.prompt) == (f"{tmp_path}/more.jsonl", "q")


def test_a_set_of_another_task_is_judged_by_that_task():
    judge = "reward.judge={url='http://127.0.0.1:9/v1', model='m'}"
    model = "model={type='pretrained', path='m'}"
    tasks = ["task={type='gsm8k', path='a'}", "eval.sets.more.task={type='gsm8k', path='b'}"]
    run = load(None, [judge, model, *tasks])
    assert run.reward.judge and run.of("more").reward.judge is None


@pytest.mark.parametrize(
    ("change", "same"),
    [
        ("eval.every=3", True),
        ("eval.sets.more.every=3", True),
        ("eval.sets.more.task.path=other.jsonl", False),
        ("task.sources.b.reward.correct=2.0", False),
    ],
)
def test_workers_are_set_up_anew_where_they_score_otherwise(
    mixed: list[str], change: str, same: bool
):
    assert (workers_hash(load(None, mixed)) == workers_hash(load(None, [*mixed, change]))) is same


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ("eval.sets.third.samples=4", ""),
        ("eval.patience=3", ""),
        ("task.sources.a.weight=5", "task.sources.a.weight"),
        ("learner.order.type=pass-rate", "learner.order"),
    ],
)
def test_sets_may_change_in_a_resumption_and_shares_not(
    mixed: list[str], change: str, refused: str
):
    run = load(None, [*mixed, "eval.best=eval/accuracy"])
    with claimed(run, resume=False) as (directory, _):
        (directory / "checkpoints" / "step-000001").mkdir(parents=True)
    Path("mine.py").write_text(MINE + "# another\n")
    if not refused:
        assert isinstance(resumed(directory, [change]), Run)
        return
    with pytest.raises(ConfigError, match=refused):
        resumed(directory, [change])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["eval.sets.a b.samples=2"], "the keys of eval.sets, a b: letters, digits, _ and -"),
        ([f"eval.sets.{'a' * 65}.samples=2"], "after a letter or digit, 64 at most"),
        (
            ["eval.sets.a.samples=2", "eval.sets.b.sample=4"],
            "eval.sets.b.sample: no such setting; did you mean eval.sets.b.samples?",
        ),
        (
            ["eval.sets.b.samples=-2"],
            "eval.sets.b.samples = -2: must be a whole number, at least 0",
        ),
        (
            ["eval.sets.b.task.type=arithmetik"],
            "eval.sets.b.task.type = 'arithmetik': no such choice; did you mean 'arithmetic'?",
        ),
        (["eval.sets.a.samples=1000"], "eval.sets.a.samples = 1000 is above rollout.engine.slots"),
        (
            ["eval.sets.a={samples=2, temperature=3}", "rollout.engine.type=vllm"],
            "eval.sets.a.temperature = 3.0: vLLM takes 0, or 0.01 to 2",
        ),
        (["eval.sets.a.top_p=0.5"], "eval.sets.a.temperature and top_p are of samples"),
        (["eval.patience=2"], "eval.patience needs eval.best"),
        (["eval.best=accuracy"], "eval.best = 'accuracy'"),
        (["eval.best=eval/a/pass_at_2"], "it is one of eval/accuracy, or eval/SET/pass_at_K"),
        (["learner.order={type='pass-rate', keep=[0.9, 0.1]}"], "holds nothing"),
        (["learner.order={type='pass-rate', new=0, medium=0, hard=0, easy=0}"], "are all 0"),
        (["learner.order={type='pass-rate', hard=-1}"], "learner.order.hard"),
    ],
)
def test_settings_that_mean_nothing_are_refused_by_name(settings: list[str], said: str):
    with pytest.raises(SettingsError) as refused:
        load(None, settings)
    assert said in str(refused.value)


def test_a_set_of_episodes_may_have_more_samples_than_slots():
    """Each is drawn by itself; those of a single turn are drawn together."""
    asked = ["eval.sets.a.samples=1000", "model.max_positions=1024"]
    run = load(None, [*asked, "rollout.environment.type=external", "rollout.serve=0"])
    assert run.eval.sets["a"].samples == 1000
