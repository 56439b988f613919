"""`areal-q plan CONFIG` says what a run takes and how fast it is expected to be.

Exit codes: 0 it fits; 1 it does not; 2 settings, or a run, that cannot be read.
"""

import math
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from areal_q.checks.automatic import settled
from areal_q.checks.hub import fetched
from areal_q.checks.memory import of_others, total
from areal_q.checks.model import check_model
from areal_q.checks.pass_memory import Lengths
from areal_q.config import External, Run, load
from areal_q.errors import ConfigError
from areal_q.observability.run_summary import plural
from areal_q.plan.calibration import measured
from areal_q.plan.estimate import RunEstimate, estimate, rows
from areal_q.plan.hardware import hardware, on_gpus
from areal_q.plan.speed import Correction
from areal_q.plan.step_load import Load
from areal_q.system.command import Overrides, console
from areal_q.system.disk import size

EXITS = "Exit codes: 0 it fits; 1 it does not; 2 settings, or a run, that cannot be read."
_DROPPED = 0.5
"""The part of the groups that is used where uniform ones are dropped, until a run has measured it"""


def main(
    config: Annotated[
        Path, typer.Argument(metavar="CONFIG", help="a TOML file, its name, or a run's directory")
    ],
    overrides: Overrides = None,
    gpu: Annotated[
        str, typer.Option(metavar="NAME[:COUNT]", help="cpu, h100:8, a100, h200, l40s, 4090, …")
    ] = "cpu",
    learner_gpus: Annotated[
        int,
        typer.Option(
            min=0, help="GPUs of the learner; 0: learner.processes, or as many as are best"
        ),
    ] = 0,
    response: Annotated[
        float, typer.Option(min=0, help="mean tokens of a response; 0: max_tokens, or the run's")
    ] = 0,
    useful: Annotated[
        float,
        typer.Option(
            min=0, max=1, help="part of the groups that is used; 0: all, or half if uniform ones go"
        ),
    ] = 0,
    from_run: Annotated[
        Path | None,
        typer.Option(
            "--from", metavar="RUN", help="take rates and lengths from a run on such hardware"
        ),
    ] = None,
    network: Annotated[
        float, typer.Option(min=0.001, metavar="GBIT/S", help="the learner's network card")
    ] = 100,
    tflops: Annotated[
        float, typer.Option(min=0, help="your own: TFLOP/s in bfloat16; of a thread, with cpu")
    ] = 0,
    gb_s: Annotated[float, typer.Option(min=0, help="your own: GB/s from memory")] = 0,
    gb: Annotated[float, typer.Option(min=0, help="your own: GB of memory")] = 0,
    explain: Annotated[bool, typer.Option("--explain", help="the formula of each line")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON object, formulas included")
    ] = False,
) -> None:
    """Say what CONFIG will take and how fast it will be, here or on GPUs, before anything is started.

    Memory of each process, bytes on the wire, the best split of GPUs, rates, idle shares, staleness.
    """
    own = {"--tflops": tflops, "--gb-s": gb_s, "--gb": gb}
    _check_finite(own | {"--response": response, "--network": network})
    file = config / "config.toml" if config.is_dir() else config
    on = hardware(gpu, tflops, gb_s, gb)
    run = settled(on_gpus(fetched(load(file, overrides)), not on.is_cpu, not on.is_cpu))
    _check_response(response, run)
    found = check_model(run)
    shape, prompt = found.shape, float(len(found.prompt))
    correction = Correction()
    lengths = Lengths(prompt, response or run.rollout.tokens_after_prompt)
    work = Load(lengths, useful or (_DROPPED if run.learner.drop_uniform else 1.0))
    if from_run:
        known, correction = measured(from_run, shape, prompt, on)
        work = Load(Lengths(prompt, response or known.lengths.response), useful or known.useful)
    made = estimate(run, shape, work, on, learner_gpus, network, correction)
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(made)).decode())
    else:
        _show(run.name, made, explain, correction if from_run else None)
    raise typer.Exit(0 if made.fits else 1)


def _check_finite(own: dict[str, float]) -> None:
    """Raises ConfigError for an option that is infinite, which its bounds let pass; NaN they refuse."""
    for name, value in own.items():
        if not math.isfinite(value):
            raise ConfigError(f"{name} {value}: must be a finite number")


def _check_response(response: float, run: Run) -> None:
    """Raises ConfigError for a mean above the longest response. An agent's turns bring prompts of their own,
    which nothing bounds."""
    rollout = run.rollout
    longest = rollout.tokens_after_prompt
    if response > longest and not isinstance(rollout.environment, External):
        raise ConfigError(
            f"--response {response:g}: above the longest response, {longest} tokens; "
            f"rollout.sampling.max_tokens = {rollout.sampling.max_tokens}"
        )


def _show(name: str, made: RunEstimate, explain: bool, correction: Correction | None) -> None:
    split, cpu = made.speed.split, made.hardware.is_cpu
    who, ranks = plural(split.workers, "worker"), split.learner_gpus
    if not cpu or ranks > 1:
        what = f"{ranks} processes" if cpu else plural(ranks, "GPU")
        who = f"{what} for the learner, {who}"
    typer.echo(f"{name}: {made.weights:,} parameters on {made.hardware}; {who}")
    table = Table(box=None, padding=(0, 1), show_header=False)
    for style in (None, None, "dim"):
        table.add_column(style=style, overflow="fold")
    for process, parts in (("the learner", made.learner), ("each worker", made.worker)):
        for gpu in (False, True):
            some = [part for part in parts if part.on_gpu == gpu]
            place = "" if cpu else ", a GPU's memory" if gpu else ", the host's"
            if some:
                table.add_row(f"{process}{place}", size(total(some, gpu)), "", style="bold")
                for part in some:
                    formula = part.formula if explain else ""
                    table.add_row(f"  {part.name}", size(part.nbytes), formula)
            if parts is made.learner and ranks > 1 and not gpu:
                other = f"each other of its {ranks} processes{place}"
                table.add_row(other, size(total(of_others(some))), "", style="bold")
    table.add_row("wire and speed", "", "", style="bold")
    for label, value, formula in rows(made):
        table.add_row(f"  {label}", value, formula if explain else "")
    console().print(table)
    if correction:
        typer.echo(
            f"measured by the run, over the formulas: learner {correction.learner:.2f}, workers' rate "
            f"{correction.workers:.2f}, delta {correction.delta:.2f}; {made.useful:.0%} of the groups are used"
        )
    typer.echo(_verdict(made))
    for line in made.advice:
        typer.echo(f"better: {line}" if made.fits else line)


def _verdict(made: RunEstimate) -> str:
    room, fits = size(made.hardware.device.memory), "it fits" if made.fits else "it does not fit"
    if made.hardware.is_cpu:
        return f"{fits}: {size(made.need)} of {room} that are free"
    return f"{fits}: {size(made.need)} of a GPU's {room} at most"
