"""Runs tests that are coroutines: on the fixture `runner` where they have one, for its engine outlives them."""

import asyncio
import inspect
import time

import pytest
from helpers.commands import limit


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Ends one that hangs with TimeoutError, shortly before pytest would end it without a word."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    test = asyncio.wait_for(pyfuncitem.obj(**arguments), limit.at_s - time.monotonic())
    runner = pyfuncitem.funcargs.get("runner")
    if isinstance(runner, asyncio.Runner):
        runner.run(test)
    else:
        asyncio.run(test)
    return True
