"""The `areal-q` command as users have it: the installed executable, its answers and its exit codes."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from helpers.commands import refused
from helpers.paths import EXECUTABLE

import areal_q
from areal_q.cli.app import ELSEWHERE, GROUPS, app
from areal_q.config import Python, Run, faults, load
from areal_q.config.load import shipped
from areal_q.errors import ConfigError
from areal_q.runner.programs import plan
from areal_q.system.command import config_and_overrides
from areal_q.tasks.datasets.jsonl_rows import read_rows


@pytest.fixture
def areal_q_command(tmp_path):
    """Runs `areal-q ARGS` in an empty directory."""
    environment = {**os.environ, "COLUMNS": "120", "NO_COLOR": "1"}
    environment.pop("REDIS_URL", None)

    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [EXECUTABLE, *args],
            cwd=tmp_path,
            env=environment | more,
            capture_output=True,
            encoding=more.get("PYTHONIOENCODING", "utf-8"),
        )

    return call


def test_a_name_that_is_no_text_is_refused_before_any_work(areal_q_command, tmp_path):
    """As files of an old disk have it: a run could not write it into its config.toml."""
    latin = os.fsdecode(b"lat\xe4")
    (tmp_path / latin).mkdir()
    for command in (["run", "quickstart", f"root={latin}"], ["status", latin], ["report", latin]):
        refused(areal_q_command(*command), "lat?: no utf-8 text: another name, or another locale")
    assert not [*(tmp_path / latin).iterdir()]


def test_a_working_directory_that_is_gone_is_one_line(tmp_path):
    (tmp_path / "here").mkdir()
    gone = 'cd "$1" && rmdir "$1" && exec "$0" status runs/x'
    command = ["sh", "-c", gone, EXECUTABLE, tmp_path / "here"]
    refused(subprocess.run(command, capture_output=True, text=True), "directory is gone")


def test_ctrl_c_while_the_command_is_imported_is_no_traceback():
    """It comes as the first module of the command is looked for."""
    program = (
        "import os, runpy, signal, sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'areal_q.cli': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "sys.argv = ['areal-q', 'version']\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "runpy.run_module('areal_q', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (-signal.SIGINT, "")


def toml(tmp_path: Path, text: str) -> str:
    (tmp_path / "bad.toml").write_text(text)
    return "bad.toml"


BAD_SETTINGS = [
    pytest.param("stepz = 3", "stepz", id="unknown key"),
    pytest.param("[learner.optimizer]\ntype = 'adamw'\nlrr = 1.0", "lrr", id="unknown nested key"),
    pytest.param("steps = 'many'", "steps", id="bad type"),
    pytest.param("[learner]\nmax_lag = -1", "learner.max_lag", id="out of range"),
    pytest.param("[task]\ntype = 'chess'", "task.type = 'chess'", id="unknown choice"),
    pytest.param(
        "[learner]\ngroups = 3\nminibatches = 2", "learner.minibatches", id="incompatible pair"
    ),
    pytest.param("steps = = 3", "line 1", id="torn TOML"),
    pytest.param("name = '../up'", "name", id="a name that leaves the directory"),
]


@pytest.mark.parametrize(("text", "named"), BAD_SETTINGS)
def test_a_bad_file_is_one_line_with_its_path_and_exit_code_2(
    areal_q_command, tmp_path, text, named
):
    result = areal_q_command("run", toml(tmp_path, text))
    assert_one_line(result, "bad.toml", named)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("command", ["run", "check", "check-config"])
def test_a_file_whose_name_looks_like_a_setting_is_read(areal_q_command, tmp_path, command):
    (tmp_path / "lr=1e-3.toml").write_text("stepz = 3")
    assert_one_line(areal_q_command(command, "lr=1e-3.toml"), "lr=1e-3.toml: stepz")


def test_a_word_is_a_setting_where_no_file_has_its_name(tmp_path):
    there = tmp_path / "lr=1"
    assert config_and_overrides(str(there), ["steps=2"]) == (None, [str(there), "steps=2"])
    there.mkdir()
    assert config_and_overrides(str(there), ["steps=2"]) == (str(there), ["steps=2"])
    long = f"name={'a' * 300}"
    assert config_and_overrides(long, None) == (None, [long])
    assert config_and_overrides(None, None) == (None, [])


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("learner.max_lga=1", "max_lga"),
        ("steps=0", "steps"),
        ("steps", "steps"),
        ("learner.objective.type=sft", "learner.objective"),
    ],
)
def test_bad_override_is_one_line_with_its_path_and_exit_2(
    areal_q_command, tmp_path, override, named
):
    toml(tmp_path, "")
    assert_one_line(areal_q_command("run", "bad.toml", override), named)


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["run", "none.toml"], "none.toml"),
        (["run"], "CONFIG"),
        (["run", "--resume"], "no run to resume"),
        (["run", "--resume", "--name", "gone"], "runs/gone"),
        (["check-config", "none.toml"], "none.toml"),
        (["report", "runs/gone"], "runs/gone"),
        (["watch", "runs/gone"], "runs/gone"),
    ],
)
def test_missing_file_or_run_is_one_line_with_path_and_exit_2(areal_q_command, args, named):
    assert_one_line(areal_q_command(*args), named)


def assert_one_line(result: subprocess.CompletedProcess[str], *named: str) -> None:
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1, result.stderr
    assert result.stderr.startswith("areal-q: error: ")
    for word in named:
        assert word in result.stderr


FAULTS = [
    ("learner.max_lagg=2", "learner.max_lagg: no such setting; did you mean learner.max_lag?"),
    ("group_sizes=8", "group_sizes: no such setting; did you mean learner.group_size?"),
    ("lerner.groups=3", "lerner: no such setting; did you mean learner?"),
    ("eval.qzxv=1", "eval.qzxv: no such setting; eval has every, problems, sets, best, patience"),
    ("learner.objective.type=arc", "learner.objective.type = 'arc': no such choice; did you mean 'acr'? It is"),
    ("rollout.format=int7", "rollout.format = 'int7': no such choice; did you mean 'int8'? It is one of bf16"),
    ("task.type=3", "task.type = 3: no such choice; it is one of arithmetic, "),
    ("task.type=jsonl", "task.path is missing: task.type = 'jsonl' needs it"),
    ("learner.max_lag=two", "learner.max_lag = 'two': must be a whole number, not text"),
    ("learner.groups=0", "learner.groups = 0: must be a whole number, at least 1"),
    ("learner.optimizer.betas=[1]", "learner.optimizer.betas = [1]: must be a list of 2"),
    ("learner=3", "learner = 3: must be a table"),
    ('name="a b"', "name = 'a b': must be letters, digits and . _ - after a letter or digit"),
    ("rollout.serve=x", "rollout.serve = 'x': must be PORT or HOST:PORT"),
    ("steps", "'steps' is no setting: write a.b=value"),
    ("learner.lr=1", "learner.lr: no such setting; here it is learner.optimizer.lr"),
    ("rollout.n=4", "rollout.n: no such setting; here it is learner.group_size"),
    ("algorithm.adv_estimator=grpo", "algorithm.adv_estimator: no such setting; here it is learner.adv"),
    ("actor={model={x=1}, optim={lr=1}}", "actor.optim.lr: no such setting; here it is learner.optimizer.lr"),
    ("buffer.sampler.beta=1", "buffer.sampler.beta: no such setting; did you mean buffer.sampler.type = "),
    ("task.path=x", "task.path: no such setting; did you mean task.type = 'calculator' or 'gsm8k'"),
    ("learner.objective.type=grpo", "learner.objective.type = 'grpo': it is chosen by learner.advantage.type"),
    ("learner.advantage.type=gspo", "learner.advantage.type = 'gspo': it is chosen by learner.objective.type"),
    ("learner.teacher.path=x", "learner.teacher.type is missing: it is one of model, server"),
    ("trackers=[{project='x'}]", "trackers[0].type is missing: it is one of mlflow, python, trackio, wandb"),
    ("reward=mine.py", "reward = 'mine.py': must be a table, not text; write reward.path = 'mine.py'"),
    ("model=a/b", "model = 'a/b': must be a table, not text; write model.type = 'pretrained' and model."),
    ("task=gsm8k", "task = 'gsm8k': must be a table, not text; write task.type = 'gsm8k'"),
    ("learner.optimizer=x", "learner.optimizer = 'x': must be a table, not text; learner.optimizer.type is"),
    ("wandb.project=x", "wandb: no such setting; here it is trackers = [{type = "),
    ("warmstart.learning_rate=1", "warmstart.learning_rate: no such setting; here it is warmstart.lr"),
    ("learner.reference_kl=0.1", "learner.reference_kl = 0.1: must be a table or nothing; it has coef, esti"),
    ("learner.objective=[1]", "learner.objective = [1]: must be a table"),
]  # fmt: skip


@pytest.mark.parametrize(("setting", "complaint"), FAULTS)
def test_a_fault_names_the_setting_and_what_is_near(setting, complaint):
    with pytest.raises(ConfigError) as caught:
        load("quickstart", [setting])
    assert str(caught.value).startswith(f"on the command line: {complaint}")


def test_a_name_of_another_program_leads_to_settings_here():
    """Whatever our table says is a setting is one, and no setting of ours is hidden by it."""
    every = faults._all_paths()
    for name, ours in faults.OURS.items():
        assert name not in every
        with pytest.raises(ConfigError) as caught:
            load(None, [f"{name}=1"])
        assert str(caught.value).endswith(f"{name}: no such setting; here it is {ours}")
        for path in re.findall(r"(?:[a-z_]+\.)+[a-z_]+", ours):
            known = faults.choices(Run, path, {"learner": {}, "rollout": {}})
            assert path in every or known, path


def test_names_that_no_file_can_have_are_no_fault(tmp_path):
    """One below a file, as one in a closed directory, and a text that is longer than any name."""
    (tmp_path / "file").touch()
    for path in (f"{tmp_path}/file/model", "m" * 300):
        assert load(None, ["model.type=pretrained", ("model.path", path)]).model
        (tmp_path / "own.toml").write_text(f"model = {{ type = 'pretrained', path = '{path}' }}")
        assert load(tmp_path / "own.toml").model


@pytest.mark.parametrize("command", ["plan", "check", "run"])
def test_a_file_beside_the_settings_is_found_from_there_alone(areal_q_command, tmp_path, command):
    """Whatever the command, names are looked up in the directory in which it was started."""
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.py").write_text("def problems(): return 1\n")
    (tmp_path / "own" / "mine.toml").write_text(
        "task = { type = 'python', path = 'mine.py:problems' }"
    )
    done = areal_q_command(command, "own/mine.toml")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        "areal-q: error: own/mine.toml: task.path = 'mine.py:problems' is looked for in the present "
        f"directory, {tmp_path}, and is beside the settings: cd own first, or write the whole path\n"
    )
    (tmp_path / "mine.py").touch()
    assert load(tmp_path / "own" / "mine.toml", ["task.path=/x.py"]).task == Python(path="/x.py")


def test_a_fault_is_blamed_on_the_file_that_has_it(tmp_path):
    (tmp_path / "own.toml").write_text("[learner]\nmax_lag = 'two'\n")
    with pytest.raises(ConfigError, match=r"own\.toml: learner\.max_lag = 'two': must be"):
        load(tmp_path / "own.toml", ["steps=3"])
    assert load(tmp_path / "own.toml", ["learner.max_lag=2"]).learner.max_lag == 2


def test_files_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "own.toml").write_text("# größer\nsteps = 3\n", encoding="utf-8-sig")
    assert load(tmp_path / "own.toml").steps == 3
    row = '{"question": "1+1", "answer": "#### 2"}\n'
    (tmp_path / "rows.jsonl").write_text(row, encoding="utf-8-sig")
    assert [row.question for row in read_rows(str(tmp_path / "rows.jsonl"))] == ["1+1"]


@pytest.mark.parametrize("name", ["quickstart", "quickstart.toml", "configs/quickstart.toml"])
def test_shipped_configurations_are_found_by_name(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    assert load(name).steps == 420
    (tmp_path / "quickstart.toml").write_text("steps = 7")
    assert load("quickstart.toml").steps == 7


def test_an_unknown_configuration_names_those_there_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        ConfigError, match=r"quickstrat: no such file; did you mean 'quickstart'\?"
    ) as e:
        load("quickstrat")
    assert "papers/qurl-gsm8k" in str(e.value) and str(shipped()) in str(e.value)


def test_check_config_prints_settings_that_load_back_equal(areal_q_command, tmp_path):
    path = toml(tmp_path, "name = 'x'\n[learner]\nmax_lag = 5\n")
    result = areal_q_command("check-config", path, "steps=7", "learner.objective.type=tis")
    assert (result.returncode, result.stderr) == (0, "")
    (tmp_path / "printed.toml").write_text(result.stdout)
    expected = load(tmp_path / path, ["steps=7", "learner.objective.type=tis"])
    assert load(tmp_path / "printed.toml") == expected


@pytest.mark.parametrize("spelling", ["version", "--version"])
def test_version_is_the_package_version(areal_q_command, spelling):
    assert areal_q_command(spelling).stdout == f"areal-q {areal_q.__version__}\n"


def test_help_lists_every_command_once(areal_q_command):
    listed = [name for names in GROUPS.values() for name in names]
    known = [c.name or c.callback.__name__ for c in app.registered_commands if c.callback]
    assert sorted(listed) == sorted([*known, *ELSEWHERE])
    result = areal_q_command("--help")
    assert result.returncode == 0
    told = re.sub(r"\s+", " ", result.stdout)
    for name in [*known, *ELSEWHERE]:
        assert f" {name} " in told
    for command, sentence in (("report", "Draws the report of a run"), ("eval", "Scores MODEL:")):
        assert f" {command} {sentence}" in told


PROGRAMS = {
    "learner": "--run-dir",
    "rollout": "--run",
    "check": "--json",
    "eval": "--samples",
    "relay": "[broadcast] counts",
    "report": "Usage: areal-q report [OPTIONS]",
    "run": "[a.b=c]...",
}


@pytest.mark.parametrize("command", PROGRAMS)
def test_help_is_told_under_the_command_typed(areal_q_command, command):
    told = areal_q_command(command, "--help").stdout
    assert told.startswith(f"Usage: areal-q {command} ") and PROGRAMS[command] in told
    assert "<bool>" not in told and "Exit codes: 0 " in told


@pytest.mark.parametrize("encoding", ["latin-1", "utf-8"])
def test_any_encoding_of_the_output_will_do(areal_q_command, encoding):
    result = areal_q_command("settings", "→", PYTHONIOENCODING=encoding)
    assert (result.returncode, result.stderr) == (0, "")
    assert ("→" in result.stdout) == (encoding == "utf-8")


LIGHT = {
    "areal_q.cli.app": {"torch", "numba", "numpy", "pyarrow", "redis"},
    "buffer.weight_sync.commands.make_keys": {"torch", "numba", "numpy", "pyarrow", "redis"},
    "rollout.commands.status": {"torch", "numba", "numpy", "pyarrow", "redis"},
    "buffer.__main__": {"torch", "numba"},
    "buffer.report.cli": {"torch", "numba"},
    "buffer.weight_sync.commands.inspect_weights": {"torch", "numba"},
    "learner.doctor.cli": {"torch", "numba"},
    "learner.replay.cli": {"torch", "numba"},
    "learner.replay.fetch": {"torch", "numba"},
    "rollout.commands.check": {"torch", "numba"},
    "rollout.commands.cluster": {"torch", "numba"},
    "rollout.evaluation.evaluate": {"torch", "numba"},
}
"""Modules of commands, and what they must not import before they need it: torch alone takes two seconds."""


@pytest.mark.parametrize("module", LIGHT)
def test_a_command_imports_no_more_than_it_needs(module):
    code = f"import sys, {module}; print(*{LIGHT[module]!r} & sys.modules.keys())"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout.strip(), result.stderr) == ("", "")


def test_the_status_of_no_run_is_one_line(areal_q_command):
    result = areal_q_command("status", "nowhere")
    assert (result.returncode, result.stderr) == (2, "areal-q: error: nowhere: no such run\n")


def test_an_unknown_option_is_refused_with_exit_code_2(areal_q_command):
    result = areal_q_command("run", "--fast")
    assert result.returncode == 2 and "--fast" in result.stderr


SHADOWS = ("buffer.py", "random.py", "areal_q.py", "learner/__init__.py", "rollout/__init__.py")


def commands(tmp_path: Path) -> dict[str, list[str]]:
    """Our command in both spellings, and the processes of a run."""
    made = plan(Run(), tmp_path, tmp_path, resume=False)
    programs = [program for program in (made.redis, made.learner, *made.workers) if program]
    ours = {program.name: [*program.argv, "--help"] for program in programs}
    script = {"areal-q": [str(EXECUTABLE), "report", "--help"]}
    module = {"python -m": [sys.executable, "-m", "areal_q", "report", "--help"]}
    return ours | script | module


@pytest.mark.parametrize("name", ["areal-q", "python -m", "redis", "learner", "rollout-0"])
def test_files_of_the_current_directory_shadow_no_module(tmp_path, monkeypatch, name):
    monkeypatch.delenv("REDIS_URL", raising=False)
    for shadow in SHADOWS if name != "python -m" else SHADOWS[:1]:
        (tmp_path / shadow).parent.mkdir(exist_ok=True)
        (tmp_path / shadow).write_text("raise RuntimeError('the wrong module')\n")
    command = commands(tmp_path)[name]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "") and "--help" in done.stdout


def test_a_task_file_imports_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_the_task.py").write_text(
        "PAIRS = [(str(i), '1') for i in range(9)]\n"
    )
    code = "from neighbour_of_the_task import PAIRS\ndef problems(): return PAIRS\n"
    (tmp_path / "own.py").write_text(code)
    script = (
        "import sys\nfrom areal_q.plugins import load_function\n"
        "print(len(load_function(sys.argv[1], 'problems')()))"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path / "own.py")]
    done = subprocess.run(command, cwd="/", capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("9\n", "")
