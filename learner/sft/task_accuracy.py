"""The task's accuracy of a supervised run, as `areal-q eval RUN` gives it: no worker generates here."""

import logging
import os
import subprocess
from pathlib import Path

import msgspec

from areal_q.evaluation.estimates import Answered, Evaluation
from areal_q.system.processes import die_with_parent, module_command

logger = logging.getLogger(__name__)
SAMPLES = 5
"""Answers that an `eval` record contains as examples"""
OF_TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_")
"""Beginnings of the variables by which torchrun would make the evaluation a rank of the learner"""
Sample = dict[str, str | bool | None]


def greedy_accuracy(directory: Path, problems: int) -> tuple[dict[str, float], list[Sample]]:
    """Returns the metrics of an evaluation of `hf/` in the run's directory on at most so many held-out problems
    of its task, and examples of the answers; nothing of either, and a line in the log, if it failed."""
    out, log = directory / "logs" / "accuracy.jsonl", directory / "logs" / "accuracy.log"
    command = module_command("areal_q", "eval", str(directory), "--out", str(out))
    command += ["--problems", str(problems), "--show", "0"]
    env = {name: value for name, value in os.environ.items() if not name.startswith(OF_TORCHRUN)}
    with log.open("ab") as output:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=env,
            preexec_fn=die_with_parent(),
        )
    if done.returncode:
        last = (log.read_text("utf-8", errors="replace").splitlines() or [""])[-1]
        logger.warning("no accuracy: areal-q eval ended with %d: %s", done.returncode, last)
        return {}, []
    about = msgspec.json.decode(out.with_suffix(".json").read_bytes(), type=Evaluation)
    lines = out.read_bytes().splitlines()[:SAMPLES]
    rows = [msgspec.json.decode(line, type=Answered) for line in lines]
    values = {"eval/problems": float(about.answered)}
    if accuracy := [e.value for e in about.estimates if e.name == "accuracy"]:
        values["eval/accuracy"] = accuracy[0]
    return values, [
        {
            "prompt": row.prompt,
            "answer": row.answer,
            "response": row.greedy.response,
            "correct": None if row.greedy.failed else row.greedy.correct,
        }
        for row in rows
        if row.greedy
    ]
