"""Evaluation: counted by hand, and its interval against published tables."""

import asyncio
import contextlib
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import typer
from helpers.commands import refused, run_here
from helpers.fixture_types import MakeRun
from helpers.paths import ROOT
from helpers.policies import initial_model
from rich.console import Console

import rollout.engines
from areal_q.config import Run, Sampling, ScriptedEngine, dump_toml
from areal_q.config.engines import EngineConfig
from areal_q.errors import CheckpointError, ConfigError, TaskError
from areal_q.evaluation.benchmarks import drawn_as
from areal_q.evaluation.estimates import Answered, estimates, read_evaluations, wilson
from areal_q.models import load_decoder, save_decoder
from areal_q.models.smoothed_state import first_folds
from areal_q.observability.metrics_log import MetricsLog
from areal_q.quant import quantize_state
from areal_q.runner.final_screen import last_screen
from areal_q.system.ports import free_ports
from areal_q.tasks import build_task, build_tokenizer
from areal_q.weights.version import WeightVersion
from rollout.engines.base import Completion, Engine
from rollout.engines.scripted import rising, scripted_engine
from rollout.evaluation import evaluate, generate


@pytest.fixture
def run_dir(make_run: MakeRun, tmp_path: Path) -> Path:
    """A run's directory with a model that was never trained."""
    run = make_run("name=demo", f'root="{tmp_path}"')
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "config.toml").write_text(dump_toml(run))
    tokenizer = build_tokenizer(run.model, run.task)
    save_decoder(initial_model(run), tmp_path / "demo" / "hf", tokenizer)
    return tmp_path / "demo"


def main(model: Path, *settings: str, **options) -> None:
    defaults: dict[str, Any] = {
        "task": None,
        "data": None,
        "preset": None,
        "problems": None,
        "samples": None,
    }
    defaults |= {"greedy": True, "temperature": None, "top_p": None, "max_tokens": None}
    defaults |= {"format": "bf16", "show": 0, "out": None}
    evaluate.main(model, list(settings), **(defaults | options))


def answering(
    monkeypatch: pytest.MonkeyPatch,
    run: Run,
    answer: Callable[[str], str],
    certainty: Callable[[int], float] = rising,
) -> None:
    """From now on the engine says `answer(prompt)`, and a sample each of its tokens with this probability."""
    tokenizer = build_tokenizer(run.model, run.task)

    def say(prompt: Sequence[int]) -> Sequence[int]:
        return [*tokenizer.encode(answer(tokenizer.decode(prompt))), tokenizer.eos_id]

    monkeypatch.setattr(
        rollout.engines, "build_engine", lambda _: scripted_engine(ScriptedEngine(), say, certainty)
    )


def right(prompt: str) -> str:
    a, b = prompt.removesuffix("=").split("+")
    return str(int(a) + int(b))[::-1]


def test_accuracy_counts_the_answers_that_are_right(
    make_run: MakeRun,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    run, out = make_run(), tmp_path / "answers.jsonl"
    problems = build_task(run.task).heldout
    answering(monkeypatch, run, right)
    main(run_dir)
    assert capsys.readouterr().out.startswith("accuracy 1.000 [0.839, 1.000]  (20 problems")

    known = {p.prompt for p in problems if p.prompt[0] in "13579"}
    correct = sum(p.prompt in known for p in problems)
    assert 0 < correct < 20
    answering(monkeypatch, run, lambda prompt: right(prompt) if prompt in known else "99")
    main(run_dir, out=out, show=2)
    said = capsys.readouterr().out
    assert f"accuracy {correct / 20:.3f} [" in said
    assert said.count("expected") == 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["prompt"] for row in rows] == [p.prompt for p in problems]
    assert [row["greedy"]["correct"] for row in rows] == [p.prompt in known for p in problems]
    wrong = [row["greedy"]["response"] for row in rows if row["prompt"] not in known]
    assert wrong == ["99"] * (20 - correct)


def test_of_several_samples_the_mean_and_the_best_are_told(
    run_dir: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    out = tmp_path / "answers.jsonl"
    main(run_dir, samples=64, temperature=1.0, out=out, format="int8", problems=7)
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 7
    right = [sum(s["correct"] for s in row["samples"]) for row in rows]
    said = capsys.readouterr().out
    assert f"avg@64 {sum(right) / (7 * 64):.3f} [" in said
    assert f"pass@64 {sum(n > 0 for n in right) / 7:.3f}" in said
    assert all(len({s["response"] for s in row["samples"]}) > 10 for row in rows)


def test_rows_that_are_solved_sometimes_are_kept_whole(
    make_run: MakeRun, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
):
    """The engine says a third of its tokens wrong, so that no number is always right."""
    data, out = tmp_path / "train.jsonl", tmp_path / "new" / "kept.jsonl"
    rows = [{"prompt": f"{n}=", "answer": str(n), "level": [n]} for n in range(5, 25)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answering(monkeypatch, make_run(), lambda prompt: prompt.removesuffix("="), lambda _: 0.7)
    main(run_dir, task="jsonl", data=data, keep="0.25..0.5", out=out)

    (answers,) = (run_dir / "evals").glob("*.jsonl")
    scored = [json.loads(line)["samples"] for line in answers.read_text().splitlines()]
    rates = [sum(reply["correct"] for reply in samples) / 8 for samples in scored]
    kept = [json.loads(line) for line in out.read_text().splitlines()]
    within = [i for i, rate in enumerate(rates) if 0.25 <= rate <= 0.5]
    assert kept == [rows[i] | {"pass_rate": rates[i]} for i in within]
    hard, easy = sum(rate < 0.25 for rate in rates), sum(rate > 0.5 for rate in rates)
    assert min(len(kept), hard, easy) > 0
    told = f"kept {len(kept)} of 20 problems, {hard} harder and {easy} easier: task.path={out}"
    assert told in capsys.readouterr().err
    again = build_task(make_run(f'task={{type="jsonl", path="{out}", heldout=0.2}}').task, None)
    assert [p.prompt for p in (*again.train, *again.heldout)] == [row["prompt"] for row in kept]


def test_kept_problems_are_those_that_are_trained_on(
    make_run: MakeRun, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    answering(monkeypatch, make_run(), right, certainty=lambda version: 1.0)
    main(run_dir, keep="1..1", out=tmp_path / "kept.jsonl", samples=1)

    task = build_task(make_run().task)
    kept = [json.loads(line) for line in (tmp_path / "kept.jsonl").read_text().splitlines()]
    assert [row["prompt"] for row in kept] == [problem.prompt for problem in task.train]
    assert all(row["pass_rate"] == 1.0 for row in kept)


def test_no_file_is_written_where_no_row_is_kept(
    make_run: MakeRun, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
):
    answering(monkeypatch, make_run(), right, certainty=lambda version: 1.0)
    out = tmp_path / "kept.jsonl"
    main(run_dir, keep="0..0.5", out=out, samples=1, problems=3)
    told = f"kept 0 of 3 problems, 0 harder and 3 easier: {out} is not written"
    assert told in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [("train.jsonl", "it exists, and --keep replaces no file"), ("new.csv", "writes JSON lines")],
)
def test_rows_that_are_kept_replace_no_data(run_dir: Path, tmp_path: Path, name: str, said: str):
    data, out = tmp_path / "train.jsonl", tmp_path / name
    data.write_text('{"prompt": "1=", "answer": "1"}\n')
    before = data.read_bytes()
    with pytest.raises(ConfigError, match=f"--out {out}: .*{said}"):
        main(run_dir, task="jsonl", data=data, keep="0..1", out=out)
    assert data.read_bytes() == before
    assert not (run_dir / "evals").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keep": "0.2"}, "--keep 0.2: it is LOW..HIGH"),
        ({"keep": "0.8..0.2"}, "--keep 0.8..0.2: it is LOW..HIGH"),
        ({"keep": "0.2..0.8"}, "--keep needs --out FILE"),
        ({"of_set": "hard"}, "--set hard: the run has no such evaluation set; eval.sets has none"),
    ],
)
def test_what_cannot_be_kept_or_asked_is_said_first(run_dir: Path, options: dict, said: str):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        main(run_dir, **options)


def test_a_set_of_the_run_is_asked_as_the_run_asks_it(
    make_run: MakeRun, run_dir: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    (tmp_path / "more.jsonl").write_text('{"prompt": "1+1=", "answer": "2"}\n' * 3)
    more = f'eval.sets.more={{task={{type="jsonl", path="{tmp_path}/more.jsonl"}}, samples=4, problems=2}}'
    drawn = [
        "rollout.sampling.temperature=0.8",
        "rollout.sampling.top_k=5",
        "rollout.sampling.min_p=0.01",
    ]
    run = make_run("name=demo", f'root="{run_dir.parent}"', more, *drawn)
    (run_dir / "config.toml").write_text(dump_toml(run))
    answering(monkeypatch, run, right, certainty=lambda version: 1.0)
    main(run_dir, of_set="more")

    (found,) = read_evaluations(run_dir)
    assert (found.task, found.asked, found.samples) == ("more", 2, 4)
    as_run = drawn_as(run.eval.sets["more"], run.rollout.sampling, "")
    assert (found.samples, found.sampling) == as_run
    assert (as_run[1].temperature, as_run[1].top_k, as_run[1].min_p) == (1.0, 5, 0.01)
    assert [e.value for e in found.estimates if e.name in ("accuracy", "pass@4")] == [1.0, 1.0]


def test_a_tool_of_the_run_answers_in_its_evaluation_too(
    run_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys
):
    tool = 'rollout.environment={type="calculator",open="(",close=")",after=" ",max_calls=1}'
    settings = [tool, "task.type=tool-calculator", "rollout.sampling.max_tokens=14"]
    run = make_run("name=demo", f'root="{run_dir.parent}"', "model.max_positions=64", *settings)
    (run_dir / "config.toml").write_text(dump_toml(run))

    def call_then_repeat(seen: str) -> str:
        prompt, _, rest = seen.partition("=")
        return f"({prompt})" if not rest else rest.rpartition(")")[2].strip()

    answering(monkeypatch, run, call_then_repeat)
    main(run_dir, problems=6)
    told = capsys.readouterr()
    assert "accuracy 1.000" in told.out and "cut off" not in told.err
    monkeypatch.undo()
    with pytest.raises(ConfigError, match=r"--max-tokens 99: .*max_positions = 32"):
        main(run_dir, max_tokens=99, problems=2)


def test_an_environment_of_ones_own_judges_evaluations_too(
    run_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys, tmp_path: Path
):
    """Two turns: the model says %, then the sum."""
    code = """
class Environment:
    def reset(self, prompt, answer):
        self.answer = answer
    def step(self, text):
        return "=", 0.5, text == self.answer
"""
    (tmp_path / "mine.py").write_text(code)
    own = f'rollout.environment={{type="python",path="{tmp_path}/mine.py",max_given_tokens=8}}'
    room = ("model.max_positions=64", "rollout.sampling.max_tokens=9")
    run = make_run("name=demo", f'root="{run_dir.parent}"', *room, own)
    (run_dir / "config.toml").write_text(dump_toml(run))
    answering(monkeypatch, run, lambda seen: "%" if seen.count("=") == 1 else right(seen[:-2]))
    out = tmp_path / "answers.jsonl"
    main(run_dir, problems=4, out=out)
    rows = [json.loads(line)["greedy"] for line in out.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [
        1.0
    ] * 4 and "accuracy 1.000" in capsys.readouterr().out
    assert all(row["response"].startswith("%=") for row in rows)


def test_agents_of_the_run_play_its_evaluation_too(
    run_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, capsys
):
    """The agent of the docs, which knows only the URL; without --serve, or without agents, that is said."""
    external = ("rollout.environment.type=external", "rollout.sampling.max_tokens=9")
    room = ("model.max_positions=64", *external)
    run = make_run("name=demo", f'root="{run_dir.parent}"', *room)
    (run_dir / "config.toml").write_text(dump_toml(run))
    with pytest.raises(ConfigError, match=r"demo: agents play .*--serve 8000.*type=single"):
        main(run_dir)
    answering(monkeypatch, run, lambda seen: right(seen[: seen.index("=") + 1]))
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}/v1"
    monkeypatch.setattr(generate, "TELL_EVERY_S", 0.01)
    agent = str(ROOT / "docs" / "examples" / "agent.py")
    told = threading.Event()

    def play() -> None:
        told.wait()
        subprocess.run([sys.executable, agent, url, "3"], check=True)

    def tell(line: str, **_: Any) -> None:
        if line == f"waiting for agents at {url}, 0 of 3 episodes open":
            told.set()

    echo = typer.echo
    monkeypatch.setattr(typer, "echo", lambda line, **more: (tell(line), echo(line, **more)))
    player = threading.Thread(target=play, daemon=True)
    player.start()
    main(run_dir, problems=3, serve_at=str(port))
    player.join()
    told_user = capsys.readouterr()
    assert f"agents may play at {url}" in told_user.err
    assert "accuracy 1.000" in told_user.out and "(3 problems" in told_user.out


def test_prompts_too_long_for_the_model_are_left_out_and_counted(
    make_run: MakeRun,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    run, path, out = make_run(), tmp_path / "some-long.jsonl", tmp_path / "answers.jsonl"
    prompts = ["1+2=", "1" * 3000 + "+2=", "3+2="]
    rows = [{"prompt": p, "answer": right(p)} for p in prompts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    answering(monkeypatch, run, right)
    main(run_dir, task="jsonl", data=path, max_tokens=4, out=out)
    told = capsys.readouterr()
    assert told.out.startswith("accuracy 1.000 [") and "(2 problems, " in told.out
    line = "left out: 1 of 3 problems, whose prompts leave no room for --max-tokens 4"
    assert line in told.err and "stopped" not in told.err
    about = json.loads(out.with_suffix(".json").read_text())
    assert (about["asked"], about["left_out"], about["answered"]) == (3, 1, 2)
    answers = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["index"], row["prompt"]) for row in answers] == [(0, prompts[0]), (2, prompts[2])]
    kept = tmp_path / "kept.jsonl"
    main(run_dir, task="jsonl", data=path, max_tokens=4, keep="0..1", samples=1, out=kept)
    assert [json.loads(line)["prompt"] for line in kept.read_text().splitlines()] == prompts[::2]
    capsys.readouterr()
    path.write_text("".join(json.dumps(row) + "\n" for row in rows[:2]))
    main(run_dir, task="jsonl", data=path, max_tokens=4)
    assert "(1 problem, " in capsys.readouterr().out
    path.write_text(json.dumps(rows[1]))
    with pytest.raises(ConfigError, match=r"--max-tokens 4: every prompt has more than \d+ tokens"):
        main(run_dir, task="jsonl", data=path, max_tokens=4, out=out)


def test_the_model_of_a_run_is_also_found_by_itself(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    main(run_dir)
    main(run_dir / "hf")
    one, other = capsys.readouterr().out.splitlines()
    assert one.split("(")[0] == other.split("(")[0]


@pytest.mark.parametrize(
    ("successes", "n", "low", "high"),
    [  # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0000, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_wilsons(successes: int, n: int, low: float, high: float):
    assert wilson(successes / n, n) == pytest.approx((low, high), abs=6e-5)
    assert wilson(1 - successes / n, n) == pytest.approx((1 - high, 1 - low), abs=6e-5)


def test_wrong_arguments_are_errors_of_the_user(run_dir: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="no such run or model"):
        main(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="--task"):
        main(tmp_path)
    with pytest.raises(ConfigError, match="--temperature"):
        main(run_dir, samples=4, temperature=0.0)
    with pytest.raises(ConfigError, match=r"task\.digits"):
        main(run_dir, "task.digits=0")
    with pytest.raises(ConfigError, match=r"rollout\.engine: the torch engine answers here"):
        main(run_dir, "rollout.engine.type=vllm")
    with pytest.raises(TaskError, match="heldout"):
        main(run_dir, "task.heldout=2000")
    (run_dir / "hf" / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        main(run_dir)


@pytest.mark.parametrize("given", [["nowhere"], ["nowhere", "--task", "arithmetic"], ["demo"]])
def test_a_missing_model_is_one_line_and_exit_code_2(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, given: list[str]
):
    (run_dir / "hf").rename(run_dir / "lost")
    monkeypatch.chdir(run_dir.parent)
    done = run_here("eval", evaluate.main, *given)
    refused(done, given[0])
    assert done.stderr.startswith("areal-q: error: ")
    assert done.stdout == ""


def test_an_unknown_format_is_an_error_of_the_user(run_dir: Path):
    with pytest.raises(ConfigError, match=r"--format int3: none of bf16, "):
        main(run_dir, format="int3")


@pytest.fixture
def additions(tmp_path: Path) -> Path:
    """A benchmark of five problems in fields of its own."""
    path = tmp_path / "additions.jsonl"
    rows = [{"prompt": f"{n}+2=", "answer": n + 2} for n in range(5)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_problem_is_asked_for_greedy_and_drawn_answers(
    make_run: MakeRun,
    run_dir: Path,
    additions: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    """The scripted engine is right when greedy; drawn, each token is right half of the time."""
    answering(monkeypatch, make_run(), right)
    main(run_dir, task="jsonl", data=additions, samples=8, format="int8")
    said = capsys.readouterr()
    names = [line.split(" ")[0] for line in said.out.splitlines()]
    assert names == ["accuracy", "avg@8", "pass@2", "pass@4", "pass@8", "majority@8"]
    assert said.out.startswith("accuracy 1.000 [0.566, 1.000]\n")
    assert "(5 problems, " in said.out

    (answers,) = (run_dir / "evals").glob("*-jsonl-int8.jsonl")
    rows = msgspec.json.Decoder(Answered).decode_lines(answers.read_bytes())
    assert [(r.index, r.prompt, r.answer) for r in rows] == [
        (n, f"{n}+2=", str(n + 2)) for n in range(5)
    ]
    assert all(r.greedy and r.greedy.correct and r.greedy.given == r.answer for r in rows)
    assert all(len(r.samples) == 8 for r in rows)
    assert all(s.correct == (s.response.strip() == r.answer) for r in rows for s in r.samples)
    (kept,) = read_evaluations(run_dir)
    assert kept.estimates == estimates(rows)
    about = json.loads(answers.with_suffix(".json").read_text())
    assert (about["task"], about["format"], about["answered"], about["asked"]) == (
        "jsonl",
        "int8",
        5,
        5,
    )
    screen = io.StringIO()
    console = Console(file=screen, width=200)
    with MetricsLog(run_dir, tensorboard=False) as metrics:
        metrics.write("step", 0, {"reward/mean": 0.5})
    last_screen(make_run(), run_dir, console)
    assert "eval jsonl int8  accuracy 1.000 [0.566, 1.000], avg@8 " in screen.getvalue()


def test_a_preset_sets_what_is_not_said_otherwise(
    make_run: MakeRun,
    run_dir: Path,
    additions: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
):
    answering(monkeypatch, make_run(), right)
    out = tmp_path / "a.jsonl"
    about = out.with_suffix(".json")
    main(run_dir, task="jsonl", data=additions, preset="qurl-aime", max_tokens=3, out=out)
    settings = json.loads(about.read_text())
    assert settings["samples"] == 32 and settings["preset"] == "qurl-aime"
    want = Sampling(temperature=1.0, top_p=0.7, max_tokens=3)
    assert msgspec.convert(settings["sampling"], Sampling) == want
    main(
        run_dir,
        task="jsonl",
        data=additions,
        preset="qurl-aime",
        max_tokens=3,
        samples=2,
        top_p=1.0,
        out=out,
    )
    settings = json.loads(about.read_text())
    assert (settings["samples"], settings["sampling"]["top_p"]) == (2, 1.0)


def test_ctrl_c_keeps_what_is_finished_and_says_its_result(
    make_run: MakeRun,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    answering(monkeypatch, make_run(), right)
    engine = rollout.engines.build_engine(make_run().rollout.engine)
    generate, asked = engine.generate, count()

    async def some(*asking: Any, **how: Any) -> Sequence[Completion]:
        """Answers three problems and no more: all that ends at once would be done before it is interrupted."""
        if next(asked) > 2:
            await asyncio.Event().wait()
        return await generate(*asking, **how)

    monkeypatch.setattr(engine, "generate", some)
    monkeypatch.setattr(rollout.engines, "build_engine", lambda _: engine)
    done = 0

    def advance() -> None:
        nonlocal done
        done += 1
        if done == 3:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(
        evaluate, "progress_of", lambda total, what: contextlib.nullcontext(advance)
    )
    out = tmp_path / "answers.jsonl"
    with pytest.raises(typer.Exit) as ended:
        main(run_dir, out=out)
    assert ended.value.exit_code == 130
    rows = msgspec.json.Decoder(Answered).decode_lines(out.read_bytes())
    assert len(rows) == done == 3
    assert [r.index for r in rows] == sorted(r.index for r in rows)
    said = capsys.readouterr()
    assert said.out.startswith("accuracy 1.000 [") and f"({done} problems" in said.out
    assert f"stopped after {done} of 20 problems" in said.err


def test_answers_that_were_cut_off_are_told(
    make_run: MakeRun,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    answering(monkeypatch, make_run(), lambda prompt: right(prompt) + "000000")
    main(run_dir, max_tokens=3)
    assert "20 of 20 answers were cut off at --max-tokens" in capsys.readouterr().err


def test_a_reward_of_ones_own_scores_an_evaluation(
    make_run: MakeRun,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    (tmp_path / "mine.py").write_text(
        "def reward(prompt, response, answer):\n"
        "    if prompt.startswith('1'): raise KeyError(prompt)\n"
        "    return 1.0\n"
    )
    answering(monkeypatch, make_run(), lambda prompt: "99")
    main(run_dir, f'reward.path="{tmp_path / "mine.py"}"')
    said, problems = capsys.readouterr(), build_task(make_run().task).heldout
    failed = sum(p.prompt.startswith("1") for p in problems)
    assert failed
    assert "accuracy 1.000 [" in said.out
    assert f"{failed} of 20 answers could not be scored and are left out" in said.err


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"preset": "aime"}, "--preset aime: none of qurl-gsm8k"),
        ({"greedy": False}, "--no-greedy needs --samples"),
        ({"data": Path("none.jsonl")}, "the run's own task reads no file"),
        ({"task": "chess"}, "^--task chess: none of aime, "),
        ({"max_tokens": 10_000}, "--max-tokens 10000: .*max_positions"),
        ({"serve_at": "8000"}, "--serve 8000: no agents play here"),
    ],
)
def test_wrong_options_are_errors_of_the_user(run_dir: Path, options: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        main(run_dir, **options)


@pytest.mark.parametrize(
    "settings",
    [
        ["learner.precision=full", "rollout.format=int8", "rollout.smoothing.alpha=0.5"],
        ["learner.precision=full", "rollout.format=int8", "rollout.sticky_scales=0.05"],
        ["rollout.format=fp8", "learner.precision=jet"],
    ],
)
def test_a_run_is_scored_in_formats_that_it_could_not_train_in(
    settings: list[str], run_dir: Path, make_run: MakeRun, capsys: pytest.CaptureFixture[str]
):
    (run_dir / "config.toml").write_text(dump_toml(make_run("name=demo", *settings)))
    main(run_dir, problems=2)
    assert "(2 problems, bf16" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="--format"):
        main(run_dir, "rollout.format=int4", problems=2)


def test_an_evaluation_is_smoothed_where_the_run_is(
    run_dir: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
):
    smooth = ("learner.precision=full", "rollout.format=int8", "rollout.smoothing.alpha=0.5")
    run = make_run("name=demo", *smooth, "rollout.unquantized=fp32")
    (run_dir / "config.toml").write_text(dump_toml(run))
    loaded: list[WeightVersion] = []
    build = rollout.engines.build_engine

    def watched(cfg: EngineConfig) -> Engine:
        engine = build(cfg)
        load = engine.load_weights

        async def load_weights(version: WeightVersion) -> None:
            loaded.append(version)
            await load(version)

        monkeypatch.setattr(engine, "load_weights", load_weights)
        return engine

    monkeypatch.setattr(rollout.engines, "build_engine", watched)
    main(run_dir, problems=2, format="int8")
    tokenizer, task = build_tokenizer(run.model, run.task), build_task(run.task)
    prompts = [tokenizer.encode_prompt(problem.asked) for problem in task.heldout[:2]]
    model = load_decoder(run_dir / "hf").requires_grad_(False)
    assert run.rollout.smooths
    folds = first_folds(model, prompts, run.rollout.smooths, "int8")
    wanted = quantize_state(model.state_dict(), "int8", folds=folds)
    (version,) = loaded
    assert all(torch.equal(version.tensors[name], tensor) for name, tensor in wanted.items())
    norm = "model.layers.0.input_layernorm.weight"
    assert not torch.equal(wanted[norm], model.state_dict()[norm])
