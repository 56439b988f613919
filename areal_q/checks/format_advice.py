"""What a pretrained model learnt with rollouts in a number format, and what to set where that falls behind.

The figures are the laboratory's (docs/stability.md): accuracy of SmolLM2-135M-Instruct on held-out sums.
`areal-q formats`, `areal-q check`, the start of a run and the doctor quote them from here. A format is named as
`areal-q formats` does, "int8, smoothed" with scales by channel, and is "aligned" where the learner computes in
the rollouts' numbers.
"""

from collections.abc import Iterator
from typing import NamedTuple

from areal_q.checks.automatic import settled, why_no_scales
from areal_q.checks.machine import CheckResult
from areal_q.config import PretrainedModel, Run
from areal_q.config.run import ROUNDS_ACTIVATIONS, WEIGHT_SCALES, WORTH_SMOOTHING


class Study(NamedTuple):
    """Trainings that differ in the rollouts' format alone, corrected by ACR."""

    length: str
    margin: float
    """How far accuracy may lie below that of bf16 before a format of eight bits counts as behind"""
    margin_of_four: float
    """The same for one of four bits"""
    accuracy: dict[str, float]
    """At the end, by the format's name"""

    def beside_bf16(self, name: str) -> float:
        return self.accuracy[name] - self.accuracy["bf16"]


STUDIES = (
    Study(
        "100 steps, 3 seeds",
        0.03,
        0.08,
        {
            "bf16": 0.77,
            "int8": 0.72,
            "int8, smoothed": 0.77,
            "int8-weight": 0.79,
            "fp8-channel, smoothed": 0.77,
            "int4, smoothed": 0.68,
            "int4, smoothed, aligned": 0.70,
        },
    ),
    Study(
        "50 steps, 1 seed",
        0.1,
        0.1,
        {"bf16": 0.78, "fp8-channel": 0.69, "fp8-weight": 0.65, "int4": 0.44, "nvfp4": 0.16},
    ),
)
"""The longest first. Each figure is compared with bench/results/ by tests/bench/test_stability.py."""


HARDLY_LEARN = ("naive", "mis")
"""Objectives that hardly learn where rollouts have four bits and the learner has not"""


def name_of(run: Run) -> str:
    """Returns the name of the rollouts' format. Example: "int4, smoothed, aligned"."""
    smoothed = ", smoothed" if run.rollout.smooths else ""
    aligned = {"full": "", "qarl": ", aligned", "jet": ", jet"}[run.learner.precision]
    return f"{run.rollout.format}{smoothed}{', LoRA' if run.learner.lora else aligned}"


def study_of(name: str) -> Study | None:
    """Returns the longest study of the format `name`; None if there is none."""
    return next((study for study in STUDIES if name in study.accuracy), None)


def learnt_with(name: str) -> str:
    """Returns a sentence on what was learnt with the format `name`, beside bf16; "" if nobody measured it."""
    if (study := study_of(name)) is None:
        return ""
    found, bf16 = study.accuracy[name], study.accuracy["bf16"]
    return (
        f"SmolLM2-135M learnt sums to {found:.2f} with it, with bf16 to {bf16:.2f} ({study.length})"
    )


def falls_behind(name: str) -> bool:
    """Returns True if less was learnt with the format `name` than with bf16. What nobody measured counts as
    behind if it has four bits that the learner does not compute in, as all that were measured are."""
    if (study := study_of(name)) is None:
        return "4" in name and not name.endswith(("aligned", "LoRA"))
    return study.beside_bf16(name) < -(study.margin_of_four if "4" in name else study.margin)


def instead(run: Run) -> str:
    """Returns settings on top of those of `run` with which more is learnt, or the gap is closed: for eight bits
    smoothing, where outliers spoil one scale a token, or weights alone; for four bits an aligned learner. "" if
    nothing is known that `run` has not got."""
    format, smoothed = run.rollout.format, run.rollout.smooths is not None
    if format == "bf16":
        return ""
    fixed = smoothed or run.learner.lora is not None or bool(why_no_scales(run))
    smooth = [] if fixed else ["rollout.smoothing.alpha=0.5"]
    if format in ("int8", "fp8", "fp8-channel", "fp8-weight"):
        weights = f"rollout.format=int8-weight{' rollout.smoothing=off' * smoothed}"
        weights += " learner.precision=full" * (run.learner.precision == "jet")
        return " or ".join([*(smooth if format in WORTH_SMOOTHING else []), weights])
    weights = ["rollout.format=int4"] if format == "int4-fp8" else []
    scales = smooth if weights or format in WEIGHT_SCALES else []
    aligned = ["learner.precision=qarl"] if run.learner.precision == "full" else []
    return " ".join([*weights, *scales, *aligned])


def format_of(run: Run) -> Iterator[CheckResult]:
    """Yields what a pretrained model learnt with the format of `run`: a warning if that was less than with
    bf16, or if outliers of activations are rounded as they come."""
    if not isinstance(run.model, PretrainedModel):
        return
    run = settled(run)
    name, rollout = name_of(run), run.rollout
    aligned = run.learner.precision != "full" or run.learner.lora is not None
    # Alignment does not take the noise away, which is that of one scale a token.
    open_to = WORTH_SMOOTHING if aligned else ROUNDS_ACTIVATIONS
    exposed = rollout.format in open_to and rollout.smooths is None
    noise = ", which rounds outliers of activations into noise" if exposed else ""
    known = learnt_with(name) or "what a pretrained model learns with it has not been measured"
    says = f"{name}{noise}: {known}; {_correction(run, aligned)} (docs/stability.md)"
    fix = instead(run) if exposed or falls_behind(name) else ""
    hardly = run.learner.objective.__struct_config__.tag in HARDLY_LEARN
    if hardly and "4" in rollout.format and not aligned:
        fix = " ".join(filter(None, [fix, "learner.objective.type=acr"]))
    if fix:
        yield CheckResult("format", "warning", says, fix)
    else:
        yield CheckResult("format", "ok", says)


def _correction(run: Run, aligned: bool) -> str:
    """Returns what the laboratory found on objectives for the format of `run`."""
    if "4" in run.rollout.format and not aligned:
        return (
            "of the objectives, acr, tis, icepop, ppo and, with response_tokens, tbpo learn; "
            f"{' and '.join(HARDLY_LEARN)} hardly do"
        )
    return "objective acr fits with its own bounds"
