"""`areal-q check [CONFIG]` says whether this machine can do what a run asks for, and what to change if not.

Exit codes: 0 if there is no error (there may be notes and warnings), 1 if there is one, 2 if CONFIG is invalid.
"""

import asyncio
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from typing import Annotated

import msgspec
import typer

from areal_q.checks.automatic import has_experts, settled, why_dtype
from areal_q.checks.hub import fetched
from areal_q.checks.machine import CheckResult, check_device, environment
from areal_q.checks.packages import worker_python
from areal_q.checks.settings import first_problems, preflight
from areal_q.config import (
    EvalConfig,
    External,
    Python,
    PythonEnvironment,
    PythonSampler,
    RolloutConfig,
    Run,
    SglangEngine,
    VllmEngine,
    load,
)
from areal_q.errors import TaskError, UserError
from areal_q.messages import FailureCause
from areal_q.system.command import Overrides, config_and_overrides, console
from areal_q.system.credentials import no_password
from areal_q.tasks import (
    Completed,
    Problem,
    Tokenizer,
    build_reward,
    build_task,
    build_tokenizer,
    columns_for,
)

_MARKS = {
    "ok": ("✓", "green"),
    "note": ("·", "dim"),
    "warning": ("!", "yellow"),
    "error": ("✗", "red"),
}

_FIXES: dict[FailureCause, str] = {
    "exception": "mend the function",
    "timeout": "a longer reward.timeout_s, or a faster function",
    "killed": "a larger reward.memory_mib, or mend the function",
    "unavailable": "what it asks must answer",
}
"""What to change where a reward fails, the worst first"""

EXITS = "Exit codes: 0 nothing is in the way; 1 something is; 2 settings that cannot be read."


def main(
    config: Annotated[
        str | None, typer.Argument(metavar="CONFIG", help="a TOML file; default: the settings'")
    ] = None,
    overrides: Overrides = None,
    redis: Annotated[
        str | None,
        typer.Option(help="URL of a Redis to look at", envvar="REDIS_URL", callback=no_password),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON list")] = False,
) -> None:
    """Looks at Python, torch, GPUs, engines, Redis, ports and disk, and at CONFIG and its model beside them."""
    run = load(*config_and_overrides(config, overrides))
    found = list(findings(run, redis))
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        show(found)
    raise typer.Exit(1 if any(f.level == "error" for f in found) else 0)


def findings(run: Run, redis: str | None) -> Iterator[CheckResult]:
    """Yields what each part finds, and a fault that several meet, as a model's tokenizer, once."""
    told: set[str] = set()
    for one in _of_each_part(run, redis):
        if one.level != "error" or one.says not in told:
            yield one
        told.add(one.says)


def _of_each_part(run: Run, redis: str | None) -> Iterator[CheckResult]:
    from buffer.redis_store.server_checks import check_redis

    yield from environment(run)
    yield from check_redis(redis)
    refused = list(settings_of(run))
    yield from refused
    if not any(one.level == "error" for one in refused):
        run = settled(fetched(run))
        yield from model_of(run)
        yield from sampler_of(run)
        yield from reward_of(run)
    yield from learner_of(run)
    yield from engine_of(run)


def settings_of(run: Run) -> Iterator[CheckResult]:
    """Yields the faults in the settings for which `areal-q run` would refuse to start."""
    try:
        preflight(fetched(run))
        yield CheckResult("settings", "ok", "directories and ports that they name")
    except UserError as error:
        yield CheckResult("settings", "error", str(error), _fix(error))


def _fix(error: UserError, otherwise: str = "another value of that setting") -> str:
    """Returns what to change: the file, or its line or row, that the error begins with, unless it goes on with
    a setting."""
    place, _, why = str(error).partition(": ")
    of_file = os.path.exists(re.sub(r":\d+$|\[\d+\]$", "", place)) and not why.startswith("task.")
    return "mend the file, or name another" if of_file else otherwise


def model_of(run: Run) -> Iterator[CheckResult]:
    """Yields what the model is, or why `areal-q run` would refuse it."""
    from areal_q.checks.model import check_model, findings

    try:
        found = check_model(run)
        _check_heads(run, found.shape.head_dim)
        yield from findings(run, found)
    except UserError as error:
        fix = _fix(error, "another model, or value of that setting")
        yield CheckResult("model", "error", str(error), fix)


def _check_heads(run: Run, width: int) -> None:
    """Raises ConfigError, in a worker's words, for heads that vLLM's attention on this CPU does not compute."""
    here = isinstance(run.rollout.engine, VllmEngine) and worker_python(run) == sys.executable
    if here and run.rollout.workers:
        from rollout.engines.process import checkpoint_backend
        from rollout.engines.vllm_backend import cpu_kernels

        if not checkpoint_backend.has_gpu():
            cpu_kernels.check_heads(width)


def sampler_of(run: Run) -> Iterator[CheckResult]:
    """Yields what a sampler of the user's own does wrong with a few made-up groups."""
    from buffer.sampling.samplers import try_out

    try:
        if isinstance(run.buffer.sampler, PythonSampler):
            try_out(run.buffer.sampler, build_task(run.task, columns_for(run)).train)
    except UserError as error:
        yield CheckResult("sampler", "error", str(error), _fix(error))


def reward_of(run: Run) -> Iterator[CheckResult]:
    """Yields what a reward of the user's own does wrong with the first problem and groups of responses that
    are its very answer, a wrong one, or empty. No data are read for one that cannot be loaded, nor where there
    is none."""
    if isinstance(run.rollout.environment, External | PythonEnvironment):
        return  # the rewards are theirs

    @cache
    def firsts() -> list[Problem]:
        task = build_task(run.task, columns_for(run))
        return [problems[0] for _, problems in first_problems(run, task)]

    try:
        for place, part in enumerate(map(run.of, run.sources)):
            if part.reward.path or isinstance(part.task, Python):
                yield from asyncio.run(_judged(part, lambda at=place: firsts()[at]))
    except UserError as error:
        yield CheckResult("reward", "error", str(error), _fix(error))


async def _judged(run: Run, first: Callable[[], Problem]) -> list[CheckResult]:
    """Returns how the reward of a run of one task fails; nothing if it gives what it should. What may come
    right later, such as a judge that does not answer yet, is a warning."""
    reward = build_reward(msgspec.structs.replace(run, eval=EvalConfig()))
    try:
        await reward.start()
        problem, tokenizer = first(), build_tokenizer(run.model, run.task)
        for what, text in _responses(problem.answer).items():
            ids = [*_said(tokenizer, text), tokenizer.eos_id]
            response = Completed(text, tokens=len(ids), ids=ids)
            # A judge may cost something for each.
            scores = await reward(problem, [response] * (1 if what else run.learner.group_size))
            causes = {score.failure for score in scores}
            for cause, fix in _FIXES.items():
                if cause in causes:
                    # A run ends if no response can be scored, and goes on without some.
                    level = "warning" if what or cause != "exception" else "error"
                    return [CheckResult("reward", level, what + reward.failure, fix)]
        return []
    finally:
        await reward.close()


def _responses(answer: str) -> dict[str, str]:
    """Returns responses that a reward must judge, by what a fault is said to be of."""
    return {
        "": answer,
        "a wrong response: ": f"{answer}0" if answer else "0",
        "an empty response: ": "",
    }


def _said(tokenizer: Tokenizer, text: str) -> list[int]:
    """Returns the tokens of `text`; none if the small model has not all of its characters, since such a run
    only never gives that answer."""
    try:
        return tokenizer.encode(text)
    except TaskError:
        return []


def learner_of(run: Run) -> Iterator[CheckResult]:
    device = run.learner.device
    try:
        check_device("learner.device", device)
        yield CheckResult("learner", "ok", f"on {device}; {why_dtype(run)}")
    except UserError as error:
        yield CheckResult("learner", "error", str(error), "a device that torch has, such as cpu")


def engine_of(run: Run) -> Iterator[CheckResult]:
    """Compares what the configured engine can do with what the run asks of it. An engine that is a server at a
    URL is queried."""
    from rollout.engines import capabilities_of

    tag = type(run.rollout.engine).__struct_config__.tag
    if (python := worker_python(run)) != sys.executable:
        yield CheckResult(f"engine {tag}", "ok", f"by {python}; a worker checks its formats")
        return
    try:
        able = capabilities_of(run.rollout.engine)
    except UserError as error:
        yield CheckResult(
            f"engine {tag}", "error", str(error), "another rollout.engine, or setting"
        )
        return
    if problem := able.lacks(run.rollout, run.learner.routing_replay, has_experts(run)):
        yield CheckResult(f"engine {tag}", "error", problem, "another rollout.engine, or setting")
    else:
        told = (
            f"formats {', '.join(sorted(able.formats))}; KV {', '.join(sorted(able.kv_on_update))}"
        )
        yield CheckResult(f"engine {tag}", "ok", told)
        yield from vllm_on_cpu(run.rollout)
    if isinstance(run.rollout.engine, SglangEngine) and run.rollout.engine.url:
        from rollout.commands.check_sglang import server_of

        yield from asyncio.run(server_of(run.model, run.rollout.engine))


def vllm_on_cpu(rollout: RolloutConfig) -> Iterator[CheckResult]:
    """Names the kernel with which vLLM computes the run's format, if it runs on a CPU."""
    engine, format = rollout.engine, rollout.format
    if not isinstance(engine, VllmEngine):
        return
    from rollout.engines.process import checkpoint_backend
    from rollout.engines.vllm_backend import cpu_kernels

    if checkpoint_backend.has_gpu():
        return
    kernel = cpu_kernels.kernel_for(format, engine.dtype)
    dtype = cpu_kernels.dtype_for(format, engine.dtype)
    has = "AMX" if cpu_kernels.has_amx() else "no AMX"
    yield CheckResult(
        "vllm on this CPU",
        "ok",
        f"{format} in {dtype} by {kernel.product}, on every processor (this one has {has}); log-probs of the "
        f"tests' small model within {kernel.tolerance_nats:g} nats of the same arithmetic elsewhere: "
        f"{kernel.why}; areal-q formats says how far on yours",
    )


def show(found: list[CheckResult]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column()
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for one in found:
        fix = (f"\n→ {one.fix}" if one.fix else "", "dim")
        table.add_row(Text(*_MARKS[one.level]), one.name, Text.assemble(one.says, fix))
    console().print(table)
    errors = sum(one.level == "error" for one in found)
    typer.echo(f"in the way: {errors}" if errors else "nothing is in the way")
