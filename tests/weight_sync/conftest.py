"""Fixtures of the tests of weight sync."""

from pathlib import Path

import pytest

from buffer.weight_sync import Endpoints


@pytest.fixture
def endpoints(short_dir: Path) -> Endpoints:
    """Endpoints of a weight server that only this test uses."""
    return Endpoints(f"ipc://{short_dir}/a", f"ipc://{short_dir}/f")
