"""Redis by name and over TLS: each side works with the rights of docker/redis/users.acl, and is refused all
else."""

import asyncio
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis
import yaml
from helpers.commands import limit
from helpers.paths import ROOT
from redis.exceptions import NoPermissionError

from areal_q.errors import BufferUnavailable
from areal_q.system.ports import free_ports
from bench.records import make_beat
from buffer.admin import inspect_state
from buffer.redis_store import LearnerBuffer, WorkerBuffer
from buffer.redis_store.connection import connect
from buffer.redis_store.keys import WORKERS_GROUP, Keys
from buffer.redis_store.lease import owner_of

KEYS = Keys("run")
ACL = ROOT / "docker" / "redis" / "users.acl"
USERS = ("learner", "rollout", "monitor")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., None]]:
    """start(binary, port="6379", …) runs a server with these settings until the test ends."""
    with ExitStack() as stack:

        def start(binary: str, **settings: str) -> None:
            given = {"save": "", "dir": str(tmp_path), "bind": "127.0.0.1"} | settings
            flat = [t for k, v in given.items() for t in (f"--{k.replace('_', '-')}", v)]
            log = stack.enter_context((tmp_path / "log").open("wb"))
            server = subprocess.Popen([binary, *flat], stdout=log, stderr=log)
            stack.callback(server.wait)
            stack.callback(server.kill)
            while b"eady to accept" not in (tmp_path / "log").read_bytes():
                assert server.poll() is None, (tmp_path / "log").read_text()
                assert time.monotonic() < limit.at_s
                time.sleep(0.02)

        yield start


@pytest.fixture(params=["redis 7", "valkey 9"])
def modern(request: pytest.FixtureRequest, binary_of) -> str:
    """Path of a server that knows selectors in its ACL."""
    return binary_of(request.param)


@pytest.fixture
def url(modern: str, start, tmp_path: Path) -> str:
    """Of a server with docker/redis/users.acl, without a user; each user's password is its name backwards."""
    _fill_in_as_compose_does(tmp_path)
    port = free_ports(1)[0]
    start(modern, port=str(port), aclfile=str(tmp_path / "users.acl"))
    return f"redis://{{}}127.0.0.1:{port}"


def _fill_in_as_compose_does(directory: Path) -> None:
    """Runs the entry point of compose.acl.yaml with the paths of this machine."""
    for user in USERS:
        (directory / f"redis_{user}").write_text(user[::-1])
    overlay = yaml.safe_load((ACL.parent.parent / "compose.acl.yaml").read_text())
    shell = overlay["services"]["redis"]["entrypoint"][2].replace("$$", "$")
    for there, here in (
        ("/secrets/", f"{directory}/"),
        ("/etc/redis/users.acl", str(ACL)),
        ("/tmp/users.acl", f"{directory}/users.acl"),
    ):
        shell = shell.replace(there, here, 1)
    done = subprocess.run(["sh", "-ec", shell, "echo", "started"], capture_output=True, check=True)
    assert done.stdout == b"started\n"


@pytest.fixture
def as_user(url: str, tmp_path: Path, monkeypatch) -> Callable[[str], str]:
    """as_user("rollout") is its URL; its password is in the file that REDIS_PASSWORD_FILE names."""

    def as_user(user: str) -> str:
        path = tmp_path / "password"
        path.write_text(f"{user[::-1]}\n")
        monkeypatch.setenv("REDIS_PASSWORD_FILE", str(path))
        return url.format(f"{user}@")

    return as_user


async def test_a_whole_run_works_with_the_rights_of_each_side(
    as_user, make_ticket, make_group, tmp_path
):
    learner = LearnerBuffer(as_user("learner"), "run")
    learner.acquire(owner_of("id", tmp_path))
    learner.publish_run("x = 1", {})
    assert (learner.cursor(), learner.published_id()) == (None, "id")
    assert (learner.readmit(0), learner.drop_eval(), learner.rewind()) == (0, 0, False)
    assert learner.now_s() > 0
    learner.admit([make_ticket(n) for n in range(4)], cursor=4)
    learner.admit_eval([make_ticket(0, purpose="eval")])
    with connect(as_user("learner")) as client:
        client.xadd(KEYS.tickets, {"record": b"\xc1"})
        client.xadd(KEYS.groups, {"record": b"\xc1"})
    worker = WorkerBuffer(as_user("rollout"), "run", "w", claim_timeout_s=0.05)
    info = await worker.run_info()
    assert info.config == "x = 1"
    worker.run.join(info)
    await worker.run.check()
    gone = WorkerBuffer(as_user("rollout"), "run", "gone")
    await gone.release(await gone.claim(1, 0.0))
    await gone.close()
    claims = await worker.claim(4, 0.0)
    assert await worker.renew(claims) == []
    for claim in claims[:3]:
        assert await worker.commit(claim, make_group(claim.ticket))
    await worker.heartbeat(make_beat("w"))
    await worker.release(claims[3:])
    await asyncio.sleep(0.1)
    claims = await worker.claim(9, 0.0)  # the poison ticket is set aside, the silent consumer goes
    assert [claim.ticket.number for claim in claims] == [2, 3]
    assert await worker.commit(claims[0], make_group(claims[0].ticket))
    await worker.release(claims[1:])
    assert learner.quarantined_total() == 1
    await worker.close()
    assert len(learner.take_eval()) == 1
    assert len(learner.take(9, 0.0)) == 3
    assert learner.quarantined_total() == 2
    assert [w.worker for w in learner.workers()] == ["w"]
    assert learner.memory().used > 0
    with connect(as_user("monitor")) as client:
        found = inspect_state.read_status(client, "run")
        assert (found.cursor, found.workers) == (4, ["w"])
        assert client.xlen(KEYS.tickets) == 1  # what KEDA asks
        assert client.xpending(KEYS.tickets, WORKERS_GROUP)["pending"] == 1  # pyright: ignore
        consumers = client.xpending(KEYS.tickets, WORKERS_GROUP)["consumers"]  # pyright: ignore
        assert [c["name"] for c in consumers] == [b"released"]
    learner.trim(learner.position)
    assert (learner.open_tickets(), learner.unread()) == ({3}, [])
    learner.finish()
    learner.forget()
    learner.close()


ANYBODY = [
    "FLUSHALL",
    "KEYS *",
    "CONFIG GET *",
    "ACL LIST",
    "SHUTDOWN",
    "MONITOR",
    "GET other",
    "SET other 1",
]
REFUSED = {
    "learner": [*ANYBODY, "XADD other * a b", "DEL other", "XREADGROUP GROUP g c STREAMS {t}:tickets >"],
    "rollout": [
        *ANYBODY,
        *("XADD {t}:tickets * record x", "XRANGE {t}:groups - +", "XREAD STREAMS {t}:groups 0"),
        *("XDEL {t}:groups 1-1", "XTRIM {t}:groups MAXLEN 0", "DEL {t}:groups", "GET {t}:cursor"),
        *("SET {t}:cursor 0", "SET {t}:admission x", "HSET {t}:run endpoints x", "SET {t}:set-aside 0"),
        *("XRANGE {t}:quarantine - +", "SMEMBERS {t}:workers", "GET {t}:worker:w"),
    ],
    "monitor": [
        *ANYBODY,
        *("XADD {t}:tickets * record x", "DEL {t}:tickets", "SET {t}:cursor 0", "XTRIM {t}:groups MAXLEN 0"),
        *("XACK {t}:tickets workers 1-1", "EVALSHA 0 0"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("user", USERS)
def test_what_a_user_does_not_need_is_refused(as_user, user):
    with connect(as_user(user)) as client:
        assert client.ping()
        for command in REFUSED[user]:
            with pytest.raises(NoPermissionError):
                client.execute_command(*command.format(t=KEYS.tag).split())


def test_a_script_gets_no_further_than_its_user(as_user):
    with connect(as_user("rollout")) as client:
        script = client.register_script("return redis.call('XRANGE', KEYS[1], '-', '+')")
        with pytest.raises(redis.ResponseError, match=r"ACL|permission|can't access"):
            script([KEYS.groups])


def test_nobody_gets_in_without_a_name_or_with_another_password(as_user, url, monkeypatch):
    other = as_user("rollout").replace("rollout@", "learner@")
    with connect(other) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    monkeypatch.delenv("REDIS_PASSWORD_FILE")
    with connect(url.format("")) as client, pytest.raises(redis.AuthenticationError):
        client.ping()
    with connect(url.format("health:any@")) as client:
        assert client.ping()
        with pytest.raises(NoPermissionError):
            client.info()


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """ca.crt, and of server, client and stranger .crt and .key; the stranger's authority is another."""
    path = tmp_path_factory.mktemp("tls")

    def openssl(*args: str) -> None:
        subprocess.run(["openssl", *args], cwd=path, check=True, capture_output=True)

    new = [
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    for authority in ("ca", "other"):
        files = ["-keyout", f"{authority}.key", "-out", f"{authority}.crt"]
        openssl(*new, "-subj", f"/CN={authority}", *files)
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        signed = ["-CA", f"{authority}.crt", "-CAkey", f"{authority}.key"]
        files = ["-keyout", f"{name}.key", "-out", f"{name}.crt"]
        openssl(
            *new, *signed, "-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", *files
        )
    return path


@pytest.fixture(params=["redis 7", "terminator"])
def tls(request: pytest.FixtureRequest, certificates: Path) -> Iterator[int]:
    """Port of a server that speaks TLS only and asks for a certificate: Redis's own TLS where it has it, and
    one that passes on to a Redis without."""
    if request.param == "terminator":
        url = request.getfixturevalue("redis_url")
        with terminator(certificates, url.removeprefix("unix://")) as port:
            yield port
        return
    binary, port = request.getfixturevalue("binary_of")("redis 7"), free_ports(1)[0]
    files = {
        f"tls_{k}_file": str(certificates / f"server.{x}")
        for k, x in (("cert", "crt"), ("key", "key"))
    }
    authority = str(certificates / "ca.crt")
    start = request.getfixturevalue("start")
    start(binary, port="0", tls_port=str(port), tls_ca_cert_file=authority, **files)
    yield port


@contextmanager
def terminator(certificates: Path, socket: str) -> Iterator[int]:
    """Yields the port at which TLS ends; the plain bytes go to the unix socket."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates / "ca.crt")
    context.load_cert_chain(certificates / "server.crt", certificates / "server.key")
    context.verify_mode = ssl.CERT_REQUIRED

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        writer.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        from_redis, to_redis = await asyncio.open_unix_connection(socket)
        try:
            await asyncio.gather(copy(reader, to_redis), copy(from_redis, writer))
        finally:
            writer.transport.abort()
            to_redis.transport.abort()

    async def serve() -> None:
        async with await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context) as server:
            opened.set_result(server.sockets[0].getsockname()[1])
            await asyncio.to_thread(ended.wait)

    opened, ended = Future[int](), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        served = pool.submit(asyncio.run, serve())
        try:
            yield opened.result()
        finally:
            ended.set()
            served.result()


def secured(certificates: Path, port: int, client: str = "client", ca: str = "ca") -> str:
    files = {"ca_certs": f"{ca}.crt", "certfile": f"{client}.crt", "keyfile": f"{client}.key"}
    query = "&".join(f"ssl_{name}={certificates / file}" for name, file in files.items())
    return f"rediss://127.0.0.1:{port}?{query}"


async def test_both_sides_work_over_tls(tls, certificates, make_ticket, make_group):
    url = secured(certificates, tls)
    learner = LearnerBuffer(url, "run")
    learner.publish_run("x = 1", {})
    learner.admit([make_ticket(0)], cursor=1)
    worker = WorkerBuffer(url, "run", "w")
    [claim] = await worker.claim(1, 0.0)
    assert await worker.commit(claim, make_group(claim.ticket))
    await worker.close()
    assert learner.unread() == [0]
    learner.close()


@pytest.mark.parametrize(
    ("client", "ca"), [("stranger", "ca"), ("client", "other")], ids=["client", "server"]
)
def test_a_certificate_of_another_authority_is_refused(tls, certificates, client, ca):
    learner = LearnerBuffer(secured(certificates, tls, client, ca), "run", patience_s=0.2)
    with pytest.raises(BufferUnavailable):
        learner.cursor()
    learner.close()


def test_plain_bytes_are_refused_where_tls_is_asked_for(tls):
    learner = LearnerBuffer(f"redis://127.0.0.1:{tls}", "run", patience_s=0.2)
    with pytest.raises(BufferUnavailable):
        learner.cursor()
    learner.close()
