"""Fixtures of the tests of weight sync."""

from contextlib import ExitStack
from pathlib import Path

import pytest
from helpers.weight_sync import WeightSync


@pytest.fixture
def sync(
    short_dir: Path, stack: ExitStack, make_version, request: pytest.FixtureRequest
) -> WeightSync:
    """Both ends of weight sync, with the settings in the test file's CONFIG."""
    return WeightSync(short_dir, stack, make_version, request.module.CONFIG)
