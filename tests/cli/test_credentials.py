"""What messages and arguments show of a URL: never a password, however it is written."""

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.connection import parse_url

from areal_q.errors import BufferUnavailable, ConfigError
from areal_q.system.credentials import check_redis_url, shown
from buffer.redis_store.connection import Patience, connect

PASSWORDS = st.text("ZQ7@:/?#%&=[].;\\ ", min_size=1, max_size=12)
"""No letter or digit of these stands anywhere else in the URLs below"""
PLACES = (
    "redis://:{}@host:6380/0",
    "redis://user:{}@host:6380/0",
    "redis://{}@host:6380/0",
    "rediss://:{}@host",
    "redis://host:6380/0?password={}",
    "redis://host:6380/0?db=1&password={}&ssl_ca_certs=ca.crt",
    "unix://:{}@/run/redis?db=0",
    "http://user:{}@host:30000",
    "{}",
)


@given(PASSWORDS, st.sampled_from(PLACES))
def test_no_character_of_a_password_is_shown(password: str, place: str):
    assert not set("ZQ7") & set(shown(place.format(password)))


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://host:6380/0", "redis://host:6380/0"),
        ("redis://:secret@host:6380/0", "redis://…@host:6380/0"),
        ("redis://:p@ss@host", "redis://…@host"),
        ("redis://host/0?password=secret", "redis://host/0?…"),
        ("redis://:a/b@host", "redis://…"),
        ("unix:///run/user@1/redis", "unix:///run/user@1/redis"),
        ("http://[::1]:30000", "http://[::1]:30000"),
        ("secret", "…"),
    ],
)
def test_a_url_is_shown_without_its_secrets(url: str, expected: str):
    assert shown(url) == expected


@given(PASSWORDS, st.sampled_from([place for place in PLACES if place.startswith("redis")]))
def test_a_url_that_is_taken_names_the_host_that_it_should(password: str, place: str):
    """What redis-py makes of it; the password never ends up in the host, the port or the database."""
    url = place.format(password)
    try:
        check_redis_url(url)
        found = parse_url(url)
    except (ConfigError, ValueError):
        return
    assert found["host"] == "host" and found.get("port", 6380) == 6380


@pytest.mark.parametrize("url", ["redis://:a/b@host", "redis://:12#34@host", "redis://:x"])
def test_a_url_whose_password_is_misread_is_refused(url: str):
    with pytest.raises(ConfigError, match="percent-encoded") as refused:
        connect(url)
    assert url not in str(refused.value)


def test_an_unreachable_redis_is_named_without_the_password():
    patience = Patience("redis://host:1/0?password=secret", 0.0)
    with pytest.raises(BufferUnavailable, match=r"^redis://host:1/0\?…: it is down"):
        patience.pause(ConnectionError("it is down"))


@pytest.mark.parametrize(
    "command",
    [
        ["learner", "--run-dir", "x"],
        ["rollout", "--run", "x"],
        ["areal_q", "check"],
        ["areal_q", "status", "--run", "x"],
        ["buffer", "status", "--run", "x"],
    ],
    ids=lambda command: " ".join(command[:2]),
)
def test_a_password_in_an_argument_is_refused(command: list[str]):
    module, *rest = command
    given = [sys.executable, "-m", module, *rest, "--redis", "redis://:secret@127.0.0.1:1"]
    done = subprocess.run(given, capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert "REDIS_PASSWORD_FILE" in done.stderr and "secret" not in done.stderr
