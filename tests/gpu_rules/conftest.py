"""Fixtures of the tests on the simulated second device."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from helpers.second_device import SecondDevice


@pytest.fixture
def cuda() -> Iterator["SecondDevice"]:
    # Importing it compiles a guard; where there is no C++ compiler, the tests skip before they come here.
    from helpers.second_device import SecondDevice

    with SecondDevice().present() as device:
        yield device
