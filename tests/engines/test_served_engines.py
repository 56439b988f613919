"""What vLLM and SGLang must both do with a model of ours, for real, on a CPU: exact log-probs, updates in
flight, deaths. What only one of them does is in files of its own.

Each needs its library, so it runs in an environment of its own: `make test-vllm`, `make test-sglang`.
"""

import asyncio
import os
import signal

import numpy as np
import psutil
import pytest
from helpers.served_model import (
    HANG_S,
    PROMPT,
    ask,
    distribution,
    gap,
    one_alive,
    packed,
    published,
    swapped_after,
)
from msgspec.structs import replace

from areal_q.config import SglangEngine, VllmEngine
from areal_q.errors import RecordError, WeightVersionError
from rollout.engines.sglang_backend.sglang_engine import sglang_engine
from rollout.engines.vllm_backend.vllm_engine import vllm_engine

pytestmark = [
    pytest.mark.timeout(HANG_S),
    pytest.mark.filterwarnings("ignore"),  # of the libraries and their dependencies' own
]
BUILD = {
    "vllm": lambda **more: vllm_engine(VllmEngine(slots=64, **more)),
    "sglang": lambda **more: sglang_engine(SglangEngine(slots=64, start_timeout_s=HANG_S, **more)),
}
MASS = {"vllm": "left", "sglang": "all"}
"""What top-p counts the mass of: SGLang also of tokens that top-k has cut"""
SMALL_CACHE = {"vllm": {"kv_cache_bytes": 2 << 20}, "sglang": {}}
"""Room for some eight requests in vLLM's cache"""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("vllm", marks=pytest.mark.vllm),
        pytest.param("sglang", marks=pytest.mark.sglang),
    ],
)
def name(request):
    missing = f"{request.param} is not installed: make test-{request.param}"
    pytest.importorskip(request.param, reason=missing)
    return request.param


@pytest.fixture(scope="module")
def live(runner, name):
    with one_alive(runner, BUILD[name]) as live:
        yield live


@pytest.mark.parametrize(
    "sampling",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 5},
        {"top_p": 0.8},
        {"temperature": 1.3, "top_k": 9, "top_p": 0.9},
        {"min_p": 0.1},
        {"temperature": 1.4, "top_k": 20, "min_p": 0.05},
    ],
)
async def test_log_probs_are_of_the_distribution_that_drew(live, name, sampling):
    engine = await live()
    if name == "sglang" and "min_p" in sampling:  # its scheduler would die of it
        with pytest.raises(RecordError, match="min_p: SGLang draws it without seeds only"):
            await engine.generate(ask(**sampling))
        assert await engine.generate(ask())
        return
    masked = "top_k" in sampling
    mass = MASS[name]
    for completion in await engine.generate(replace(ask(samples=4, **sampling), masked=masked)):
        assert gap(completion, 0, **sampling, mass=mass) < 2e-4
        if sampling:
            assert gap(completion, 0) > 0.05
        if masked:
            ids = completion.response_ids.tolist()
            left = distribution(0, "bf16", PROMPT, ids, **sampling, mass=mass) > -np.inf
            wanted = [np.flatnonzero(row).tolist() for row in left]
            assert [row.tolist() for row in completion.sampling_mask] == wanted


async def test_kept_keys_are_stale_and_the_log_probs_say_so(live):
    engine = await live()
    done = await swapped_after(engine, published(1), 30, ask(max_tokens=350))
    at = done.spans[0].tokens
    assert [s.version for s in done.spans] == [0, 1]
    assert gap(done, 0, last=at) < 2e-4
    assert gap(done, 1, first=at) > 0.05
    assert np.isfinite(done.logprobs).all()


async def test_a_cached_prompt_is_computed_again_under_new_weights(live):
    engine = await live()
    await engine.generate(ask())
    await engine.load_weights(published(1))
    (done,) = await engine.generate(ask())
    assert gap(done, 1) < 2e-4


async def test_half_of_a_fused_layer_is_refused(live):
    engine = await live()
    whole = published(1).tensors
    part = {n: t for n, t in whole.items() if "k_proj" not in n and "v_proj" not in n}
    with pytest.raises(WeightVersionError, match=r"lacks .*k_proj"):
        await engine.load_weights(packed(part, 1))
    (done,) = await engine.generate(ask())
    assert done.spans[0].version == 0
    assert gap(done, 0) < 2e-4


async def test_cancellations_and_updates_disturb_no_other_request(live):
    engine = await live()
    tasks = [asyncio.ensure_future(engine.generate(ask(seed=i, max_tokens=100))) for i in range(64)]
    for version in (1, 2, 3, 4):
        await asyncio.sleep(0.1)
        for task in tasks[version::8]:
            task.cancel()
        await engine.load_weights(published(version))
    results = await asyncio.gather(*tasks, return_exceptions=True)
    cancelled = [r for r in results if isinstance(r, asyncio.CancelledError)]
    done = [r[0] for r in results if isinstance(r, list)]
    assert len(cancelled) + len(done) == 64 and len(done) >= 32
    assert all(len(c.response_ids) == 100 for c in done)
    assert engine.active == 0 and engine.deaths == 0


async def test_a_killed_engine_comes_back_and_goes_on_where_it_was(live, name):
    """SGLang's scheduler is killed, the process that holds the model; its death takes the server along."""
    engine = await live()
    deaths, pid, drawn = engine.deaths, engine.backend.pid, []
    children = psutil.Process(pid).children() if name == "sglang" else []
    holder = next((child.pid for child in children if "scheduler" in child.name()), pid)
    assert (holder == pid) == (name == "vllm")

    def on_token(index, token, logprob):
        drawn.append(token)
        if len(drawn) == 20:
            os.kill(holder, signal.SIGKILL)

    (done,) = await engine.generate(ask(max_tokens=350), on_token)
    assert engine.deaths > deaths and engine.backend.pid != pid
    assert drawn == done.response_ids.tolist() and len(drawn) == 350
    assert [(s.version, s.tokens) for s in done.spans] == [(0, 350)]
    assert gap(done, 0) < 2e-4
    await engine.load_weights(published(1))
    (done,) = await engine.generate(ask())
    assert gap(done, 1) < 2e-4


async def test_no_response_begins_on_old_keys_and_values(live, name):
    """Requests that wait in the engine while weights change, their prompt cached under the old ones."""
    engine = await live(**SMALL_CACHE[name])
    tasks = [asyncio.ensure_future(engine.generate(ask(seed=i, max_tokens=8))) for i in range(300)]
    for version in (1, 2, 3, 4, 5):
        enough = engine.tokens_drawn + 200
        while engine.tokens_drawn < enough and engine.active:
            await asyncio.sleep(0.01)
        await engine.load_weights(published(version))
    done = [completion for (completion,) in await asyncio.gather(*tasks)]
    assert len({c.spans[0].version for c in done}) > 1
    for completion in done:
        first = completion.spans[0]
        assert gap(completion, first.version, last=first.tokens) < 2e-4
