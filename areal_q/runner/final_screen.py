"""The last screen of a run: its results, where its files are, and which commands to type next."""

from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from areal_q.config import Arithmetic, Run
from areal_q.evaluation.estimates import Evaluation, read_evaluations
from areal_q.observability.learning_faults import advice
from areal_q.observability.metrics_log import TENSORBOARD_DIR, read_metrics
from areal_q.observability.run_summary import ExampleAnswer, Summary, plural, summarize
from areal_q.system import command
from areal_q.system.run_dir import METRICS_FILE, has_checkpoint


def last_screen(run: Run, run_dir: Path, console: Console | None = None) -> None:
    """Prints the last screen of a run, or one line if the run has no metrics yet."""
    console = console or command.console()
    path = run_dir / METRICS_FILE
    records = read_metrics(path) if path.exists() else []
    if not records:
        console.print(f"{run.name}: stopped before its first record", highlight=False)
        return
    console.print(_screen(run, run_dir, summarize(records, run)), highlight=False)


def _screen(run: Run, run_dir: Path, summary: Summary) -> RenderableType:
    parts: list[RenderableType] = [Text(), Text(f"{run.name}: {summary.title}", "bold")]
    count, rows = len(summary.faults), summary.rows
    # What comes first may be the cause of the others, so that only its advice is given.
    change = [("", f"→ {advice(summary.faults[0], run)}")] if count else []
    parts.append(_pairs([*rows[:count], *change, *rows[count:]]))
    if evaluations := read_evaluations(run_dir):
        parts += [Text(), _pairs([_evaluation(e) for e in evaluations])]
    if summary.answers:
        parts += [Text(), _answers(summary.answers)]
        if isinstance(run.task, Arithmetic) and run.task.reversed:
            said = "  answers are written with the least significant digit first (task.reversed)"
            parts.append(Text(said, "dim"))
    hf = run_dir / "hf"
    paths = [("model", str(hf))] if hf.is_dir() else []
    paths += [
        ("checkpoints", str(run_dir / "checkpoints")),
        ("metrics", str(run_dir / METRICS_FILE)),
    ]
    parts += [Text(), _pairs(paths), Text(), _pairs(_next_commands(run, run_dir, summary))]
    return Group(*parts)


def _next_commands(run: Run, run_dir: Path, summary: Summary) -> list[tuple[str, str]]:
    """Returns the commands to suggest, only those that would work."""
    more = f" steps={2 * run.steps}" if summary.reason == "done" else ""
    if more and summary.step < run.steps:
        more = " eval.patience=0"
    commands = [("evaluate", f"areal-q eval {run_dir}")] if (run_dir / "hf").is_dir() else []
    if run.sft and commands:
        path = f"model.type=pretrained model.path={run_dir / 'hf'}"
        commands.append(("RL from here", f"areal-q run CONFIG {path}"))
    if has_checkpoint(run_dir) and run.eval.best:
        commands.append(("the best", f"areal-q export {run_dir} DIR --best"))
    if has_checkpoint(run_dir):
        command = "sft" if run.sft else "run"
        commands.append(("go on", f"areal-q {command} {run_dir} --resume{more}"))
    commands.append(("look closer", f"areal-q report {run_dir}"))
    return [*commands, ("or with", f"tensorboard --logdir {run_dir / TENSORBOARD_DIR}")]


def _evaluation(e: Evaluation) -> tuple[str, str]:
    """Returns a row such as ("eval aime int8", "accuracy 0.333 [0.193, 0.512], avg@32 …   (30 problems,
    qurl-aime)")."""
    asked = plural(e.asked, "problem")
    asked = asked if e.answered == e.asked else f"{e.answered} of {asked}"
    told = ", ".join(map(str, e.estimates)) or "no answers"
    return f"eval {e.task} {e.format}", f"{told}   ({asked}{f', {e.preset}' if e.preset else ''})"


def _pairs(rows: list[tuple[str, str]]) -> RenderableType:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True, min_width=17)
    # Folding breaks long lines without inserting spaces, so that paths and commands can be copied.
    grid.add_column(overflow="fold")
    for label, value in rows:
        grid.add_row(f"  {label}", Text(value))
    return grid


def _answers(answers: list[ExampleAnswer]) -> RenderableType:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for column in ("  prompt", "expected", "before", "after"):
        table.add_column(column, max_width=36, no_wrap=True, overflow="ellipsis")
    for a in answers:
        row = [_one_line(text) for text in (f"  {a.prompt}", a.expected)]
        row += [_marked(a.before, a.correct_before), _marked(a.after, a.correct_after)]
        table.add_row(*row)
    return table


def _marked(text: str, correct: bool | None) -> Text:
    """Returns the response after a mark for right or wrong, or a question mark if it could not be scored."""
    if correct is None:
        return Text("? ", "yellow") + _one_line(text)
    mark = Text("✓ ", "green") if correct else Text("✗ ", "red")
    return mark + _one_line(text)


def _one_line(text: str) -> Text:
    return Text(command.one_line(text))
