"""SGLang as the engine, for real, on a CPU: exact log-probs, updates in flight, a server of others', deaths.

Needs SGLang, so it runs in an environment of its own: `make test-sglang`.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from helpers.engines import serving
from helpers.paths import ROOT
from helpers.served_model import (
    CONFIG,
    HANG_S,
    PROMPT,
    ask,
    expected,
    gap,
    one_alive,
    published,
    swapped_after,
)

from areal_q.config import RolloutConfig, SglangEngine
from areal_q.errors import ConfigError, EngineDied, RecordError
from rollout.engines.base import Completion
from rollout.engines.process.checkpoint_backend import check_quantized, write_version
from rollout.engines.sglang_backend import server_checks
from rollout.engines.sglang_backend.http_client import SglangClient
from rollout.engines.sglang_backend.server_process import SglangProcess, server_settings
from rollout.engines.sglang_backend.sglang_engine import sglang_engine

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.timeout(HANG_S),
    pytest.mark.filterwarnings("ignore"),  # of SGLang's and its dependencies' own
]
pytest.importorskip("sglang", reason="SGLang is not installed: make test-sglang")


@pytest.fixture(scope="module")
def live(runner):
    def build(**settings):
        return sglang_engine(SglangEngine(slots=64, start_timeout_s=HANG_S, **settings))

    with one_alive(runner, build) as live:
        yield live


async def test_what_a_cancelled_request_would_have_drawn_is_not_drawn(live):
    """SGLang is told: it has nothing to do soon after, not only when the response would be complete."""
    engine = await live()
    client = engine.backend._client
    task = asyncio.ensure_future(engine.generate(ask(prompt=[1], max_tokens=500)))
    while not await running_requests(client):  # counted some time after its first token
        assert not task.done()
    task.cancel()
    await asyncio.wait([task])
    while await running_requests(client):
        await asyncio.sleep(0.01)
    assert task.cancelled()


async def running_requests(client):
    (load,) = (await client.get("/v1/loads"))["loads"]
    return load["num_running_reqs"]


async def test_an_update_in_flight_is_exact_before_and_after(live):
    engine = await live(kv_on_update="recompute")
    done = await swapped_after(engine, published(1), 30, ask(max_tokens=350))
    assert [(s.version, s.digest) for s in done.spans] == [
        (v, published(v).manifest.digest) for v in (0, 1)
    ]
    at = done.spans[0].tokens
    assert gap(done, 0, last=at) < 2e-4 and gap(done, 1, first=at) < 2e-4
    assert gap(done, 0, first=at) > 1 and gap(done, 1, last=at) > 1


async def test_pushed_weights_equal_those_a_fresh_server_loads(live):
    engine = await live(kv_on_update="recompute")
    client = engine.backend._client
    before = await checksums(client)
    await engine.load_weights(published(1))
    other = await checksums(client)
    await engine.load_weights(published(0))
    assert await checksums(client) == before
    same = {name for name in before if before[name] == other[name]}
    assert all("norm" in name for name in same) and len(same) < len(before)


async def checksums(client):
    told = await client.post("/weights_checker", {"action": "checksum"})
    return told["ranks"][0]["checksums"]


@contextlib.asynccontextmanager
async def running(directory, **more) -> AsyncIterator[SglangProcess]:
    """A server that nobody of ours owns, with version 7 under a stamp that is not ours."""
    config = SglangEngine(slots=8, kv_on_update="recompute")
    path = directory / "model"
    path.mkdir()
    write_version(published(7), path)
    settings = server_settings(config, str(path), CONFIG, "someone's") | more
    server = await SglangProcess.start(settings, directory)
    try:
        yield server
    finally:
        await server.close()


def test_float32_on_a_gpu_has_attention_that_takes_it_seeded(monkeypatch):
    from sglang.srt.arg_groups import choices  # pyright: ignore[reportMissingImports]

    monkeypatch.setattr("rollout.engines.process.checkpoint_backend.has_gpu", lambda: True)
    wide = server_settings(SglangEngine(dtype="float32"), "model", CONFIG, "0:a")
    assert wide["attention_backend"] in choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND
    assert wide["attention_backend"] != "fa3" and wide["dtype"] == "float32"
    assert "attention_backend" not in server_settings(SglangEngine(), "model", CONFIG, "0:a")


UNSEEDED: list[dict[str, Any]] = [
    {"top_k": 7},
    {"min_p": 0.1},
    {"temperature": 1.4, "top_k": 20, "top_p": 0.95, "min_p": 0.05},
]
"""What a server draws that needs no seeds; min-p only there"""


def gap_off_edges(done: Completion, sampling: dict[str, Any]) -> float:
    """Returns the largest difference to transformers' log-probs. A token at the edge of top-p or min-p may be
    kept by one side alone, so that the nearest of a few thresholds, 0.1 % apart, counts."""
    ids, factors = done.response_ids.tolist(), (0.999, 1.0, 1.001)
    differences = []
    for p, m in product(factors, factors):
        scale = {"top_p": p, "min_p": m}
        near = {name: value * scale.get(name, 1) for name, value in sampling.items()}
        differences.append(
            np.abs(done.logprobs - expected(0, "bf16", PROMPT, ids, **near, mass="all"))
        )
    return float(np.min(differences, axis=0).max())


async def test_a_running_server_gets_our_weights_and_is_checked(tmp_path, monkeypatch):
    key = tmp_path / "key"
    key.write_text("no")
    monkeypatch.setenv("SGLANG_KEY_FILE", str(key))
    async with running(tmp_path, enable_deterministic_inference=False) as server:
        settings = {"url": server.url, "slots": 8, "kv_on_update": "recompute"}

        async def refusal(**changes):
            with pytest.raises((ConfigError, EngineDied)) as refused:
                async with serving(sglang_engine(SglangEngine(**settings | changes)), published(0)):
                    pass
            return str(refused.value)

        assert "asks for another key" in await refusal()
        key.write_text(server.key)
        assert "--enable-deterministic-inference" in await refusal()
        engine = sglang_engine(SglangEngine(**settings, seeded=False))
        async with serving(engine, published(0)):
            for sampling in UNSEEDED:
                for done in await engine.generate(ask(samples=4, **sampling)):
                    assert [s.version for s in done.spans] == [0]
                    assert gap_off_edges(done, sampling) < 2e-4
                    assert gap(done, 0) > 0.05
            done = await swapped_after(engine, published(1), 30, ask(max_tokens=350))
            at = done.spans[0].tokens
            assert gap(done, 0, last=at) < 2e-4 and gap(done, 1, first=at) < 2e-4
            client = SglangClient(server.url, server.key, 60)
            await client.post("/update_weight_version", {"new_version": "another's"})
            await client.close()
            with pytest.raises(EngineDied, match="another's"):
                engine.backend.restarts = 0
                await engine.generate(ask())


async def test_a_format_that_sglang_does_not_run_is_refused(tmp_path):
    """modelopt_fp4 starts on a CPU, and stays in full precision."""
    async with running(tmp_path, quantization="modelopt_fp4", dtype="bfloat16") as server:
        client = SglangClient(server.url, server.key, 60)
        try:
            info = await server.up(client, HANG_S)
            told = await server_checks.linears(client, info, "int8")
            seen = await server_checks.linears(
                client, {n: v for n, v in info.items() if "areal_q" not in n}, "int8"
            )
        finally:
            await client.close()
        for linears in (told, seen):
            assert len(linears) == 4 * CONFIG.layers
            check_quantized("SGLang", linears, "bf16")
            with pytest.raises(EngineDied, match=r"int8: SGLang runs .* as Unquantized"):
                check_quantized("SGLang", linears, "int8")
        with pytest.raises(ConfigError, match="fp8 cannot be seen"):
            await server_checks.linears(client, {}, "fp8")


def test_quantized_formats_are_refused_by_name_on_a_cpu():
    engine = sglang_engine(SglangEngine())
    assert engine.capabilities.formats == {"bf16"}
    problem = engine.capabilities.lacks(RolloutConfig(format="int8", engine=SglangEngine()))
    assert problem is not None and "int8 is not among bf16" in problem


async def test_a_truncation_beyond_the_servers_mask_is_refused(live, monkeypatch):
    engine = await live(kv_on_update="recompute")
    monkeypatch.setattr(engine.backend, "_most_masked", 10)
    with pytest.raises(RecordError, match="keep up to 48 tokens"):
        await engine.generate(ask(top_p=0.9))
    assert await engine.generate(ask(top_p=0.9, top_k=10))


CHILD = """
import asyncio, sys
sys.path[:0] = {paths!r}
import test_sglang
from areal_q.config import SglangEngine

async def main():
    engine = test_sglang.sglang_engine(SglangEngine(slots=4))
    await engine.start()
    await engine.load_weights(test_sglang.published(0))
    print(engine.backend.pid, engine.backend._directory, flush=True)
    await asyncio.sleep(300)

if __name__ == "__main__":
    asyncio.run(main())
"""


def test_kill_9_of_the_worker_leaves_no_engine_behind(tmp_path):
    script = tmp_path / "child.py"
    script.write_text(CHILD.format(paths=[os.path.dirname(__file__), str(ROOT / "tests")]))
    child = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None
        pid, directory = child.stdout.readline().split()
        processes = [psutil.Process(int(pid)), *psutil.Process(int(pid)).children(recursive=True)]
        child.send_signal(signal.SIGKILL)
        child.wait()
        deadline = time.monotonic() + 120
        while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert not Path(directory).exists()
    finally:
        child.kill()
        child.wait()
