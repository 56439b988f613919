"""The Python API in a real kernel, whose own event loop runs while a cell does."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.commands import stretched

manager: Any = pytest.importorskip(
    "jupyter_client.manager", reason="needs jupyter-client and ipykernel: make test-notebook"
)
pytestmark = [pytest.mark.notebook, pytest.mark.timeout(120)]
TRAIN = """
import asyncio, areal_q
LONG = 3
def reward(response, row):
    return len(response) / LONG + row["level"]
rows = [{"prompt": f"{n}+1=", "answer": str(n + 1), "level": n % 2} for n in range(20)]
loop = asyncio.get_running_loop()
run = areal_q.train(data=rows, reward=reward, steps=2, name="nb", settings=SETTINGS)
"""
SETTINGS = {
    "model": {"layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "mlp": 48},
    "learner.groups": 4,
    "learner.group_size": 2,
    "rollout.sampling.max_tokens": 4,
    "warmstart.steps": 2,
}


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[Any]:
    started, client = manager.start_new_kernel(kernel_name="python3", cwd=str(tmp_path))
    try:
        yield client
    finally:
        client.stop_channels()
        started.shutdown_kernel(now=True)


def run_cell(kernel: Any, code: str) -> list[dict[str, Any]]:
    """Returns the messages that a cell gave, in their order. Fails with the traceback of one that raised."""
    said: list[dict[str, Any]] = []
    reply = kernel.execute_interactive(code, timeout=stretched(100), output_hook=said.append)
    assert reply["content"]["status"] == "ok", "\n".join(reply["content"]["traceback"])
    return said


def test_a_cell_trains_shows_evaluates_and_replays(kernel: Any):
    said = run_cell(kernel, f"SETTINGS = {SETTINGS!r}\n{TRAIN}")
    shown = [m for m in said if m["msg_type"] in ("display_data", "update_display_data")]
    # One output, which is replaced: what it shows last is the last step.
    assert len({m["content"]["transient"]["display_id"] for m in shown}) == 1
    assert [m["msg_type"] for m in shown[:2]] == ["display_data", "update_display_data"]
    assert "nb" in shown[0]["content"]["data"]["text/plain"]
    assert "2/2" in shown[-1]["content"]["data"]["text/plain"]
    code = "print([areal_q.evaluate(run, problems=2).answered, areal_q.replay(run), loop.is_running()])"
    printed = "".join(
        m["content"]["text"] for m in run_cell(kernel, code) if m["msg_type"] == "stream"
    )
    assert "[2, True, True]" in printed
    loop = """
async with areal_q.Rollout(run) as rollout:
    ((one,),) = await rollout.generate(["1+1="], temperature=0)
import json; print(json.dumps(one.ids))
"""
    printed = "".join(
        m["content"]["text"] for m in run_cell(kernel, loop) if m["msg_type"] == "stream"
    )
    assert json.loads(printed.splitlines()[-1])
