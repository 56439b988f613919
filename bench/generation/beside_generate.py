"""Generation alone, 64 sequences at once on one thread: our engine against Hugging Face `generate`."""

import asyncio
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from areal_q.config import Run, Sampling, TorchEngine
from areal_q.models import load_decoder
from areal_q.tasks import build_task, build_tokenizer
from bench.common import ROOT, peer_env
from learner.publishing.version_builder import VersionBuilder
from rollout.engines import build_engine
from rollout.engines.base import Engine, Request

PEER = ROOT / "bench" / "peers" / "hf_generate.py"
SEQUENCES = 64
REPEATS = 5


class Workload(msgspec.Struct, frozen=True):
    """Both systems draw at temperature 1 from the whole vocabulary, 64 sequences at a time."""

    name: str
    prompts: int
    samples: int
    """Responses to each prompt; `generate` gets the prompt so many times"""
    max_tokens: int
    stop: bool
    """Responses end at end of text; otherwise all are max_tokens long, which suits `generate` best"""


def workloads(run: Run) -> list[Workload]:
    group, max_tokens = run.learner.group_size, run.rollout.sampling.max_tokens
    return [
        Workload("128 tokens each", SEQUENCES, 1, 128, stop=False),
        Workload(f"the task, {group} to a prompt", SEQUENCES, group, max_tokens, stop=True),
    ]


def ours(run: Run, model: Path, work: Workload) -> float:
    """Tokens a second of the run's engine and number format: the median of some repeats."""
    torch.set_num_threads(1)
    return statistics.median(asyncio.run(_ours(run, model, work)))


async def _ours(run: Run, model: Path, work: Workload) -> list[float]:
    tokenizer = build_tokenizer(run.model, run.task)
    stop = frozenset(tokenizer.stops if work.stop else ())
    requests = [
        Request(
            prompt_ids=np.array(tokenizer.encode_prompt(p), np.int32),
            num_samples=work.samples,
            sampling=Sampling(max_tokens=work.max_tokens),
            seed=i * work.samples,
            stop_ids=stop,
        )
        for i, p in enumerate(_prompts(run, work))
    ]
    engine = build_engine(TorchEngine(slots=SEQUENCES))
    await engine.start()
    try:
        await engine.load_weights(VersionBuilder(run).build(load_decoder(model), 0))
        return [await _rate(engine, requests) for _ in range(REPEATS + 1)][1:]
    finally:
        await engine.close()


async def _rate(engine: Engine, requests: list[Request]) -> float:
    began, before = time.perf_counter(), engine.tokens_drawn
    await asyncio.gather(*map(engine.generate, requests))
    return (engine.tokens_drawn - before) / (time.perf_counter() - began)


def hugging_face(python: Path, run: Run, model: Path, work: Workload, spec_file: Path) -> float:
    """Tokens a second of `generate` in float32: the median of as many repeats."""
    spec: dict[str, Any] = {
        "model": str(model),
        "prompts": [p for p in _prompts(run, work) for _ in range(work.samples)],
        "sequences": SEQUENCES,
        "max_tokens": work.max_tokens,
        "stop": work.stop,
        "temperature": 1.0,
        "threads": 1,
        "repeats": REPEATS,
        "seed": run.seed,
    }
    spec_file.write_text(json.dumps(spec))
    argv = [str(python), str(PEER), str(spec_file)]
    out = subprocess.run(argv, env=peer_env(threads=1), capture_output=True, text=True)
    if out.returncode:
        sys.exit(f"Hugging Face generate failed:\n{out.stderr[-2000:]}")
    return statistics.median(json.loads(out.stdout.splitlines()[-1])["tokens_per_s"])


def _prompts(run: Run, work: Workload) -> list[str]:
    train = build_task(run.task).train
    return [train[i].prompt for i in range(work.prompts)]
