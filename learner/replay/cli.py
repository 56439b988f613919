"""`areal-q replay RUN` repeats learner steps offline, from a checkpoint and the log.

Exit codes: 0 the steps are as recorded, or other settings were given; 1 something differs; 2 there is no run,
checkpoint or log to replay (one line on stderr); 130 Ctrl-C.
"""

from bdb import BdbQuit
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from areal_q.config.load import Override, in_words
from areal_q.errors import ConfigError
from areal_q.observability.progress_bar import progress_of
from areal_q.system import command
from areal_q.system.command import RunDirectory, StopBefore
from areal_q.system.run_dir import recorded_settings

First = Annotated[
    int | None, typer.Option("--from", min=0, help="first step; default: of the first checkpoint")
]
_Settings = Annotated[
    list[str] | None, typer.Option("--set", help="a.b=c, such as learner.objective.type=tbpo")
]
_UntilDiverges = Annotated[
    bool, typer.Option("--until-diverges", help="stop at the first step that differs")
]
_Debug = Annotated[bool, typer.Option("--debug", help="with --step: a debugger before the update")]

EXITS = (
    "Exit codes: 0 as recorded, or another history was asked for; 1 something differs; 2 "
    "nothing to replay, or a setting that cannot change, which one line names."
)


def main(
    directory: RunDirectory,
    first: First = None,
    stop: StopBefore = None,
    settings: _Settings = None,
    until_diverges: _UntilDiverges = False,
    step: Annotated[int | None, typer.Option(min=0, help="this step alone, every metric")] = None,
    debug: _Debug = False,
) -> None:
    """Re-runs the learner steps of RUN and compares them with what was recorded.

    With --set, what would have happened on the same samples: both histories side by side, in
    RUN/replay/ as CSV too. With --set reward.…, what the logged responses are worth
    under another reward, without any step.
    """
    if step is not None:
        first, stop = step, step + 1
    elif first is not None and stop is not None and stop <= first:
        raise ConfigError(
            f"--to {stop} is not after --from {first}: --to is the step to stop before"
        )
    elif debug:
        raise ConfigError("--debug: say in which step, by --step N")
    if settings and _rewards(directory, settings, first, stop, until_diverges or debug):
        return
    # torch takes seconds to import; by now a wrong option has been refused.
    from learner.replay.replay_steps import Replay
    from learner.replay.tables import every_metric

    replay = Replay(directory, settings, first, stop)
    console = command.console()
    if replay.begins:
        typer.echo(replay.begins, err=True)
    done, differing = _run(replay, until_diverges, debug)
    if step is not None:
        console.print(every_metric(done[-1]))
    if replay.what_if:
        _show_both(replay, done, differing, console)
    else:
        equal = _verdict(replay, done, differing, console)
        raise typer.Exit(0 if equal else 1)


def _rewards(
    directory: Path, settings: Sequence[Override], first: int | None, stop: int | None, steps: bool
) -> bool:
    """Compares another reward with the logged one if `settings` ask for one. Returns False, and does nothing,
    if they do not. `steps`: an option was given that is of learner steps."""
    from learner.replay.rescored import (
        asks_for_rewards,
        most_table,
        rescored,
        rows_table,
        write_rows,
    )

    recorded = recorded_settings(directory)
    if not asks_for_rewards(recorded, settings):
        return False
    if steps:
        raise ConfigError(
            "--until-diverges, --debug: another reward is compared without learner steps"
        )
    found = rescored(directory, recorded, settings, first or 0, stop)
    file, console = directory / "replay" / "rewards.csv", command.console()
    write_rows(found, file)
    ends = f"steps {found.rows[0].step}–{found.rows[-1].step}"
    console.print(
        f"{ends} with {in_words(settings)}: other rewards of the responses that were learnt from"
    )
    console.print(rows_table(found))
    if found.failure:
        console.print(f"not scored, the last one: {found.failure}")
    if found.most:
        console.print(f"{len(found.most)} that differ most:")
        console.print(most_table(found))
    typer.echo(f"every step: {file}")
    return True


def _run(replay, until_diverges: bool, debug: bool):
    """Replays and returns (the requested steps, the differences by step for steps that have any)."""
    from learner.replay.compare import compare

    done, differing = [], {}
    stops_in = replay.first if debug else None

    def before(policy, number, batch, history) -> None:
        if number == stops_in:
            try:
                inspect(policy, number, batch, history)
            except BdbQuit:
                raise typer.Exit from None

    # A debugger has the terminal for itself.
    shown = nullcontext(lambda: None) if debug else progress_of(len(replay.records), "steps")
    with shown as advance:
        for one in replay.steps(before):
            advance()
            if one.record.step < replay.first:
                continue
            done.append(one)
            if differences := compare(one, replay.exact):
                differing[one.record.step] = differences
                if until_diverges:
                    break
    return done, differing


def inspect(policy, step: int, drawn, history) -> None:
    """Starts the debugger in step `step`, before its update. Its variables are `samples`, one per response;
    `minibatches`, one per optimizer step, each a list of micro-batches; `batch` (PackedBatch) and `inputs`
    (LossInputs) of the first micro-batch; and `policy`, with `policy.model`."""
    from learner.data.packing import samples_of
    from learner.policy_update import prepare_minibatches

    cfg = policy.cfg
    samples = samples_of(drawn, cfg.advantage, history, step, cfg.mask)
    minibatches = prepare_minibatches(policy, samples)
    batch, inputs = minibatches[0][0]  # noqa: RUF059
    typer.echo(
        f"step {step}: {len(samples)} samples, {len(minibatches)} minibatches; look at samples, minibatches, "
        "batch, inputs, policy.model; `c` goes on, `q` ends"
    )
    breakpoint()
    typer.echo(f"step {step}: on to the update")


def _verdict(replay, done, differing, console: Console) -> bool:
    """Says what differs, and returns True if nothing does."""
    from learner.replay.compare import TOLERANCES, step_ranges

    how = "bit for bit"
    if not replay.exact:
        console.print(f"logged on    {replay.records[0].machine}\nreplayed on  {replay.machine}")
        bounds = ", ".join(f"{k} ± {r:g} of it + {a:g}" for k, (r, a) in TOLERANCES.items())
        console.print(f"other arithmetic, so compared within tolerances: {bounds}")
        how = "within tolerances"
    numbers = f"every metric ({len(done[0].record.metrics)}), loss and gradient norm among them,"
    if all(one.digest for one in done):
        numbers = f"{numbers} and weights"
    if not replay.exact:
        numbers = "loss, gradient norm, KL, entropy"
    steps = [one.record.step for one in done]
    if not differing:
        console.print(f"{step_ranges(steps)}: {numbers} {how}", style="green")
    else:
        first = min(differing)
        same = [s for s in steps if s < first]
        if same:
            console.print(f"{step_ranges(same)}: {numbers} {how}", style="green")
        console.print(f"step {first} differs: {len(differing[first])} numbers", style="red")
        for difference in differing[first][:8]:
            console.print(f"  {difference}")
        if len(differing) > 1:
            console.print(
                f"{len(differing)} of {len(steps)} steps differ, the last is {max(differing)}"
            )
    whole = replay.exact and steps[-1] + 1 == replay.stop
    return (not whole or _checkpoint_equals(replay, console)) and not differing


def _checkpoint_equals(replay, console: Console) -> bool:
    unequal = replay.unequal_tensors(replay.stop)
    if unequal is None:
        return True
    name = f"checkpoint step-{replay.stop:06d}"
    if unequal:
        console.print(f"{name}: {len(unequal)} tensors differ, {unequal[0]} first", style="red")
    else:
        console.print(f"{name}: weights and optimizer equal, tensor by tensor", style="green")
    return not unequal


def _show_both(replay, done, differing, console: Console) -> None:
    from learner.replay.compare import step_ranges
    from learner.replay.tables import side_by_side, write_csv

    out = replay.directory / "replay"
    out.mkdir(exist_ok=True)
    steps = step_ranges([one.record.step for one in done])
    changed = in_words(replay.settings)
    write_csv(done, out / "replay.csv")
    console.print(f"{steps} with {changed}: another history, on the samples that were logged")
    console.print(side_by_side(done, console.width))
    for step, differences in sorted(differing.items())[:1]:
        console.print(
            f"step {step} is the first that differs by more than rounding: {differences[0]}"
        )
    if not differing:
        console.print("no step differs by more than rounding")
    typer.echo(f"both histories: {out / 'replay.csv'}")
