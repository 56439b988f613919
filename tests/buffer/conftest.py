"""Fixtures of the tests of the buffer."""

from collections.abc import Iterator

import pytest
import redis


@pytest.fixture
def client(redis_url: str) -> Iterator[redis.Redis]:
    """A plain client of the session's Redis."""
    with redis.Redis.from_url(redis_url) as made:
        yield made
