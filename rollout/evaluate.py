"""`areal-q eval MODEL`: accuracy of a model on a task's held-out problems, with the reference engine."""

import asyncio
import json
import math
import sys
import time
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from areal_q.config import Run, Sampling, TorchEngine, load
from areal_q.errors import ConfigError, UserError
from areal_q.tasks import Problem, build_score, build_task, build_tokenizer


def main(
    model: Annotated[
        Path, typer.Argument(help="a run directory, or a model in Hugging Face layout")
    ],
    settings: Annotated[
        list[str] | None, typer.Argument(help="a.b=c, such as task.digits=3")
    ] = None,
    task: Annotated[str | None, typer.Option(help="type of task; default the run's own")] = None,
    problems: Annotated[int, typer.Option(min=1, help="at most so many held-out problems")] = 512,
    samples: Annotated[int, typer.Option(min=1, help="responses to each problem")] = 1,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy")] = 0.0,
    format: Annotated[str, typer.Option(help="number format of the linear weights")] = "bf16",
    show: Annotated[int, typer.Option(min=0, help="print so many answers")] = 5,
    out: Annotated[Path | None, typer.Option(help="write every answer and score as JSONL")] = None,
) -> None:
    """Scores MODEL on held-out problems: greedy accuracy, or avg@k and pass@k of sampled answers."""
    if samples > 1 and temperature == 0:
        raise ConfigError("--samples above 1 needs --temperature above 0")
    run, path = _settings(model, task, [f"rollout.format={format}", *(settings or [])])
    sampling = Sampling(temperature=temperature, max_tokens=run.rollout.sampling.max_tokens)
    started = time.monotonic()
    rows = asyncio.run(_answers(run, path, problems, samples, sampling))
    elapsed = time.monotonic() - started
    if out:
        out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    for row in rows[:show]:
        mark = "✓" if row["correct"][0] else "✗"
        typer.echo(f"  {mark} {row['prompt']}{row['responses'][0]}   (expected {row['answer']})")
    typer.echo(summary(rows, samples) + f"  ({len(rows)} problems, {elapsed:.1f} s)")


def _settings(model: Path, task: str | None, overrides: list[str]) -> tuple[Run, Path]:
    """The run's own settings where MODEL is a run's directory, defaults elsewhere."""
    config = next(
        (d / "config.toml" for d in (model, model.parent) if (d / "config.toml").is_file()), None
    )
    path = model / "hf" if (model / "hf").is_dir() else model
    if config is None and task is None:
        raise ConfigError(f"{model}: not a run's directory, so --task is needed")
    choice = [f"task.type={task}"] if task else []
    pretrained = ["model.type=pretrained", f"model.path={json.dumps(str(path))}"]
    return load(config, [*choice, *pretrained, *overrides]), path


async def _answers(
    run: Run, path: Path, problems: int, samples: int, sampling: Sampling
) -> list[dict]:
    from areal_q.models import load_decoder
    from areal_q.quant import quantize_state
    from areal_q.weights import pack
    from rollout.engines import build_engine
    from rollout.engines.base import Request

    task, tokenizer = build_task(run.task), build_tokenizer(run)
    score = build_score(run.task)
    model = load_decoder(path)
    engine = build_engine(TorchEngine())
    await engine.start()
    try:
        await engine.load_weights(
            pack(
                quantize_state(model.state_dict(), run.rollout.format),
                run="eval",
                epoch="",
                version=0,
                format=run.rollout.format,
                uaq_scale=1.0,
                model=model.config.to_hf(),
                published_s=time.time(),
            )
        )

        async def answer(index: int, problem: Problem) -> dict:
            completions = await engine.generate(
                Request(
                    prompt_ids=np.array(tokenizer.encode_prompt(problem.prompt), np.int32),
                    num_samples=samples,
                    sampling=sampling,
                    seed=run.seed + index * samples,
                    stop_ids=frozenset({tokenizer.eos_id}),
                )
            )
            texts = [tokenizer.decode(c.response_ids.tolist()) for c in completions]
            return {
                "prompt": problem.prompt,
                "answer": problem.answer,
                "responses": texts,
                "correct": [score(problem, text).correct for text in texts],
            }

        return await asyncio.gather(*(answer(i, p) for i, p in enumerate(task.heldout[:problems])))
    finally:
        await engine.close()


def summary(rows: list[dict], samples: int) -> str:
    """One line. The interval is Wilson's at 95 % over problems (for avg@k it treats a problem's mean as
    one draw, which is conservative)."""
    mean = sum(sum(r["correct"]) / samples for r in rows) / len(rows)
    low, high = wilson(mean, len(rows))
    name = "accuracy" if samples == 1 else f"avg@{samples}"
    line = f"{name} {mean:.3f} [{low:.3f}, {high:.3f}]"
    if samples > 1:
        line += f"  pass@{samples} {sum(any(r['correct']) for r in rows) / len(rows):.3f}"
    return line


def wilson(p: float, n: int, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a proportion `p` of `n` draws."""
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


if __name__ == "__main__":
    try:
        typer.run(main)
    except UserError as error:
        print(f"areal-q: error: {error}", file=sys.stderr)
        sys.exit(2)
