"""Tests that are coroutines are run, and fail."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from helpers.commands import limit
from helpers.hooks.coroutine_tests import pytest_pyfunc_call


async def test_a_coroutine_is_run_on_the_loop_of_its_fixture(runner: asyncio.Runner):
    assert asyncio.get_running_loop() is runner.get_loop()


@pytest.mark.parametrize("runs", [{}, {"runner": asyncio.Runner()}])
def test_a_coroutine_that_fails_or_hangs_fails(
    monkeypatch: pytest.MonkeyPatch, runs: dict[str, Any]
):
    async def failing(named: str) -> None:
        raise LookupError(named)

    async def hanging() -> None:
        await asyncio.Event().wait()

    def run(test: Any, *names: str) -> None:
        info = SimpleNamespace(argnames=names)
        item = SimpleNamespace(obj=test, funcargs={"named": "x"} | runs, _fixtureinfo=info)
        pytest_pyfunc_call(cast(pytest.Function, item))

    with pytest.raises(LookupError, match="x"):
        run(failing, "named")
    monkeypatch.setattr(limit, "at_s", time.monotonic())
    with pytest.raises(TimeoutError):
        run(hanging)
