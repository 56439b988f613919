"""`areal-q eval MODEL`: accuracies of a model on held-out problems or on a benchmark's file.

    areal-q eval runs/quickstart
    areal-q eval MODEL --task aime --data aime24.jsonl --preset qurl-aime

Answers are written as they come in. Ctrl-C keeps them and prints the accuracies of what is there.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from areal_q.errors import ConfigError, ContextExceeded, RecordError, os_errors_as
from areal_q.evaluation.benchmarks import PRESETS, preset_named, with_options
from areal_q.evaluation.estimates import Answered, Evaluation, estimates_by_source
from areal_q.observability.progress_bar import progress_of
from areal_q.observability.run_summary import plural
from areal_q.system.files import write_whole
from areal_q.tasks import Problem, Tokenizer, build_tokenizer
from rollout.evaluation.kept_rows import SAMPLES, WantedRows, wanted_rows, write_rows
from rollout.evaluation.questions import (
    EvalQuestions,
    as_evaluated,
    asked_problems,
    check_format,
    check_samples,
    default_out,
    set_of,
    settings_of,
)

INTERRUPTED = 130


_Model = Annotated[Path, typer.Argument(help="a run directory, or a model in Hugging Face layout")]
_Settings = Annotated[list[str] | None, typer.Argument(help="a.b=c, such as task.digits=3")]
_TaskName = Annotated[
    str | None, typer.Option(help="type of task or name of a benchmark; default the run's own")
]
_Data = Annotated[
    Path | None,
    typer.Option(help="a file, or a data set of the Hub: all of it, in place of held-out problems"),
]
_PresetName = Annotated[
    str | None, typer.Option(help=f"a paper's sampling settings: {', '.join(PRESETS)}")
]
_Problems = Annotated[int | None, typer.Option(min=1, help="at most so many")]
_Samples = Annotated[
    int | None, typer.Option(min=0, help="sampled answers to each problem, for avg@k and pass@k")
]
_Greedy = Annotated[bool, typer.Option(help="also ask for the most likely answer")]
_Temperature = Annotated[float | None, typer.Option(min=0.0, help="of samples")]
_TopP = Annotated[float | None, typer.Option(min=1e-6, max=1.0, help="of samples")]
_MaxTokens = Annotated[int | None, typer.Option(min=1, help="of an answer")]
_Format = Annotated[str, typer.Option(help="number format of the linear weights")]
_Show = Annotated[int, typer.Option(min=0, help="print so many answers")]
_Out = Annotated[Path | None, typer.Option(help="file of answers; default RUN/evals/… for a run")]
_KEEP = "ask the training problems, and write to --out those with such a share of right answers"
_Keep = Annotated[str | None, typer.Option(metavar="LOW..HIGH", help=_KEEP)]
_OfSet = Annotated[
    str | None, typer.Option("--set", help="one of the run's eval.sets, asked as that says")
]
_ServeAt = Annotated[
    str,
    typer.Option(
        "--serve", metavar="[HOST:]PORT", help="let agents play the problems here; on loopback"
    ),
]
_ServeToken = Annotated[str | None, typer.Option(help="file with the token that agents must send")]


def main(
    model: _Model,
    settings: _Settings = None,
    task: _TaskName = None,
    data: _Data = None,
    preset: _PresetName = None,
    problems: _Problems = None,
    samples: _Samples = None,
    greedy: _Greedy = True,
    temperature: _Temperature = None,
    top_p: _TopP = None,
    max_tokens: _MaxTokens = None,
    format: _Format = "bf16",
    show: _Show = 5,
    out: _Out = None,
    keep: _Keep = None,
    of_set: _OfSet = None,
    serve_at: _ServeAt = "",
    serve_token: _ServeToken = None,
) -> Evaluation:
    """Scores MODEL: greedy accuracy, and avg@k, pass@k and majority@k of sampled answers."""
    check_format(format, settings or [])
    wanted = wanted_rows(keep, out) if keep else None
    chosen, whole = preset_named(preset, f"--preset {preset}"), data is not None
    run, path = settings_of(model, task, data, settings or [])
    if of_set is not None:
        run, chosen, whole, problems = set_of(run, of_set, problems)
    if wanted:
        samples, greedy = samples or chosen.samples or SAMPLES, False
    chosen = with_options(chosen, samples, temperature, top_p, max_tokens)
    check_samples(chosen, greedy, run)
    run = as_evaluated(run, model, format, serve_at)
    found = asked_problems(run, whole, wanted is not None)
    found = found[: problems or (None if data or wanted else 512)]
    served = serve_at, serve_token
    asked = EvalQuestions(run, path, found, greedy, chosen, served, of_set is not None)
    if wanted or out is None:
        out = default_out(model, of_set or ("train" if wanted else task), format, preset)
    named = {"model": str(model), "data": str(data) if data else None, "preset": preset}
    named["task"] = of_set or task or str(run.task.__struct_config__.tag)
    return evaluate(asked, named, show, out, wanted)


def evaluate(
    asked: EvalQuestions,
    named: dict[str, Any],
    show: int,
    out: Path | None,
    wanted: WantedRows | None,
) -> Evaluation:
    """Asks the model for answers, prints `show` of them and the accuracies, and writes both to `out` and beside
    it; of the problems the rows that are `wanted` as well. Returns what the file beside the answers says, with
    the fields of `named`. Raises typer.Exit if Ctrl-C came before the last answer."""
    from rollout.evaluation.generate import fitting

    started, tokenizer = time.monotonic(), build_tokenizer(asked.run.model, asked.run.task)
    kept = fitting(asked, tokenizer)
    with _answers_file(out) as (write, file):
        rows = asyncio.run(_collect(asked, kept, tokenizer, write))
    about = Evaluation(
        **named,
        format=asked.run.rollout.format,
        samples=asked.preset.samples,
        sampling=asked.sampling,
        asked=len(asked.problems),
        left_out=len(asked.problems) - len(kept),
        answered=len(rows),
        elapsed_s=time.monotonic() - started,
        estimates=estimates_by_source(rows),
    )
    _print_results(rows, about, show)
    if file:
        file.with_suffix(".json").write_bytes(msgspec.json.format(msgspec.json.encode(about)))
        typer.echo(f"answers and scores: {file}", err=True)
    if wanted:
        write_rows(asked, rows, wanted)
    if len(rows) < len(kept):
        typer.echo(f"stopped after {len(rows)} of {plural(len(kept), 'problem')}", err=True)
        raise typer.Exit(INTERRUPTED)
    return about


def _print_results(rows: Sequence[Answered], about: Evaluation, show: int) -> None:
    """Prints the first `show` answers and then the estimates. Remarks go to stderr."""
    for row in rows[:show]:
        reply = row.greedy or row.samples[0]
        mark = "✓" if reply.correct else "✗"
        typer.echo(f"  {mark} {row.prompt} → {reply.response}   (expected {row.answer})")
    for estimate in about.estimates[:-1]:
        typer.echo(estimate)
    last = about.estimates[-1] if about.estimates else ""
    typer.echo(f"{last}  ({plural(len(rows), 'problem')}, {about.format}, {about.elapsed_s:.1f} s)")
    for remark in remarks(rows):
        typer.echo(remark, err=True)
    if about.left_out:
        typer.echo(
            f"left out: {about.left_out} of {plural(about.asked, 'problem')}, whose prompts leave no room for "
            f"--max-tokens {about.sampling.max_tokens}",
            err=True,
        )


async def _collect(
    asked: EvalQuestions,
    problems: Mapping[int, Problem],
    tokenizer: Tokenizer,
    write: Callable[[Answered], Any],
) -> list[Answered]:
    """Returns the answers in the problems' order; if cancelled by Ctrl-C, those that are done. `write` is
    called with each answer as it comes. Raises ConfigError for a prompt that cannot fit into the model."""
    from rollout.evaluation.generate import answered

    rows: list[Answered] = []
    answers = answered(asked, problems, tokenizer, partial(typer.echo, err=True))
    try:
        with progress_of(len(problems), "problems") as advance:
            async for row in answers:
                rows.append(row)
                write(row)
                advance()
    except asyncio.CancelledError:
        pass
    except ContextExceeded as error:  # a prompt that can never fit into the model
        raise ConfigError(f"--max-tokens {asked.sampling.max_tokens}: {error}") from error
    except RecordError as error:
        raise ConfigError(str(error)) from error
    finally:
        await answers.aclose()
    return sorted(rows, key=lambda row: row.index)


def remarks(rows: Sequence[Answered]) -> list[str]:
    """Returns warnings for a reader of the accuracies: how many answers were cut off or could not be scored."""
    replies = [r for row in rows for r in [*row.samples, *([row.greedy] if row.greedy else [])]]
    cut = sum(not r.finished for r in replies)
    failed = sum(r.failed for r in replies)
    told = [f"{cut} of {len(replies)} answers were cut off at --max-tokens"] if cut else []
    left_out = f"{failed} of {len(replies)} answers could not be scored and are left out"
    return told + ([left_out] if failed else [])


@contextlib.contextmanager
def _answers_file(path: Path | None) -> Iterator[tuple[Callable[[Answered], Any], Path | None]]:
    """Yields a function that writes an answer as a line, at once, and the path of the file. The lines are
    sorted at the end. Raises ConfigError for a file that cannot be written."""
    if path is None:
        yield (lambda row: None), None
        return
    if path.suffix == ".json":
        raise ConfigError(f"--out {path}: the summary goes there; name the answers {path}l")
    with os_errors_as(ConfigError, f"--out {path}"):
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("wb", buffering=0)
    lines: list[tuple[int, bytes]] = []

    def write(row: Answered) -> None:
        lines.append((row.index, msgspec.json.encode(row) + b"\n"))
        file.write(lines[-1][1])

    with file:
        yield write, path
    write_whole(path, b"".join(line for _, line in sorted(lines)))
