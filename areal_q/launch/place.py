"""The directory of a launch, which every host of the cluster sees under the same path.

PLACE = root/NAME.launch/   mode 0700
    settings.toml     what the roles are started with
    secrets/          the password of Redis
    keys/             CURVE keys, with which weights are encrypted and workers admitted
    redis/            Redis's append-only file, so that another host goes on with it
    endpoint.json     where Redis and the learner's first rank are, written by the learner's host
    ended.json        the learner's exit code, once it is of no use to start it again
    refused/          a file for each worker that ended with 2
    logs/, scripts

The run itself is beside it, in root/NAME.
"""

import os
import secrets
import shutil
import subprocess
from pathlib import Path

import msgspec
from msgspec import Struct

from areal_q.config import Run, dump_toml
from areal_q.errors import ConfigError, os_errors_as
from areal_q.system.files import try_lock, write_whole
from areal_q.system.processes import module_command
from areal_q.system.run_dir import path_of, with_absolute_files

SETTINGS, PASSWORD, KEYS = "settings.toml", "secrets/redis_password", "keys"
_ENDPOINT, _ENDED, _REFUSED = "endpoint.json", "ended.json", "refused"


class RunAddresses(Struct, frozen=True, kw_only=True):
    """The places of a run's parts. Example: RunAddresses(host="node7", redis="redis://node7:20017",
    announce=20018, fetch=20019, ranks=20020, start="4711.0")"""

    host: str
    """The name under which other hosts reach the learner's first rank."""
    redis: str
    """URL without a password."""
    announce: int
    """Ports, in turn: announcements and deltas, whole versions, and the ranks among themselves."""
    fetch: int
    ranks: int
    start: str
    """Names the start of the learner that wrote this, so that its other ranks wait for no older one."""


class LearnerEnded(Struct, frozen=True):
    """A learner that will not be started again by itself."""

    code: int
    """0: the run is finished; 2: something to mend."""


def place_of(run: Run) -> Path:
    return path_of(run).absolute().with_name(f"{run.name}.launch")


def prepared(run: Run) -> Path:
    """Returns the directory of a launch of `run` with settings, password and keys; those that are there stay.

    Raises ConfigError if it cannot be written, or a learner is at work there."""
    run = with_absolute_files(msgspec.structs.replace(run, root=str(Path(run.root).absolute())))
    place = place_of(run)
    with os_errors_as(ConfigError, place):
        if place.exists():
            os.close(claim(place))
        for directory in (place, place / "logs", place / "secrets"):
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o700)
        write_whole(place / SETTINGS, dump_toml(run))
        if not (place / PASSWORD).exists():
            # Nobody else may read it, not even while it is written.
            handle = os.open(place / PASSWORD, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_hex(32))
        (place / _ENDED).unlink(missing_ok=True)
        shutil.rmtree(place / _REFUSED, ignore_errors=True)
    if not (place / KEYS).exists():
        made = subprocess.run(
            module_command("areal_q", "keys", str(place / KEYS)),
            capture_output=True,
            encoding="utf-8",
        )
        if made.returncode:
            raise ConfigError(f"{place / KEYS}: {made.stderr.strip()}")
    return place


def claim(place: Path) -> int:
    """Returns a descriptor that locks the directory until it is closed, or this process ends. Raises
    ConfigError if a learner has it."""
    handle = try_lock(place)
    if handle is None:
        raise ConfigError(
            f"{place}: the learner of an earlier launch is at work there: end it first"
        )
    return handle


def close_secrets(place: Path) -> None:
    """Keeps the secrets from other users of a host that got copies of them without their modes."""
    for path in (*(place / PASSWORD).parent.iterdir(), *(place / KEYS).glob("*_secret")):
        path.chmod(0o600)


def write_endpoint(place: Path, endpoint: RunAddresses) -> None:
    write_whole(place / _ENDPOINT, msgspec.json.encode(endpoint))


def read_endpoint(place: Path) -> RunAddresses | None:
    """Returns what the learner's host has written; None if it has not yet."""
    try:
        return msgspec.json.decode((place / _ENDPOINT).read_bytes(), type=RunAddresses)
    except FileNotFoundError:
        return None


def write_ended(place: Path, code: int | None) -> None:
    """Notes that the learner ended for good with `code`; None: that it has begun."""
    if code is None:
        (place / _ENDED).unlink(missing_ok=True)
        return
    write_whole(place / _ENDED, msgspec.json.encode(LearnerEnded(code)))


def read_ended(place: Path) -> LearnerEnded | None:
    try:
        return msgspec.json.decode((place / _ENDED).read_bytes(), type=LearnerEnded)
    except FileNotFoundError:
        return None


def write_refused(place: Path, worker: str) -> None:
    """Notes that a worker ended with something to mend, and will not be started again by itself."""
    (place / _REFUSED).mkdir(exist_ok=True)
    (place / _REFUSED / worker).touch()


def all_refused(place: Path, workers: int) -> bool:
    """Returns whether so many have been noted, since the launch, as it has workers; never of none."""
    return 0 < workers <= len(list((place / _REFUSED).glob("*")))
