"""`areal-q buffer`: what it tells is what is there, what it writes comes back bit for bit."""

import asyncio
import io
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout

import pytest
from helpers.commands import refused
from helpers.strategies import groups
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from areal_q.config import Run, dump_toml
from areal_q.messages import Array, encode
from areal_q.system.command import escaped
from bench.records import make_ticket
from buffer.__main__ import main
from buffer.admin import actions, inspect_state
from buffer.logs.trajectory_log import TrajectoryLog
from buffer.redis_store import LearnerBuffer, WorkerBuffer, lua_scripts
from buffer.redis_store.keys import Keys
from buffer.redis_store.local_server import RedisServer

KEYS = Keys("run")
HOSTILE = "\x1b[2J[bold]</script>\u202egnp.exe\x07\n[/]"


def process(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "areal_q", "buffer", *args]
    return subprocess.run(command, capture_output=True, text=True)


def tool(*args: str, input: str = "") -> subprocess.CompletedProcess[str]:
    """The command in this process: the same arguments, output and exit code."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("COLUMNS", "200")
        patch.setattr(sys, "argv", ["areal-q buffer", *args])
        patch.setattr(sys, "stdin", io.StringIO(input))
        with pytest.raises(SystemExit) as ended:
            main()
    code = ended.value.code or 0
    return subprocess.CompletedProcess(args, int(code), out.getvalue(), err.getvalue())


@pytest.fixture
def filled(client, redis_url, make_ticket, make_group, make_run) -> list[str]:
    """Redis with two groups, one of hostile text, three open tickets of which one is claimed, and one group in
    the quarantine. The options that lead there."""
    learner = LearnerBuffer(redis_url, "run")
    learner.publish_run(dump_toml(make_run()), {})
    tickets = [make_ticket(n) for n in range(5)]
    tickets[1] = make_ticket(1, prompt=HOSTILE)
    learner.admit(tickets, cursor=5)

    async def work() -> None:
        worker = WorkerBuffer(redis_url, "run", "w")
        claims = await worker.claim(3, 0.0)
        for claim in claims[:2]:
            group = make_group(claim.ticket)
            judged = [replace(t, reward_notes={"judge": HOSTILE}) for t in group.trajectories]
            await worker.commit(claim, replace(group, trajectories=judged))
        await worker.close()

    asyncio.run(work())
    client.xadd(KEYS.groups, {"record": b"\xc1 bad"})
    learner.read(9, 0.0)
    learner.close()
    return ["--redis", redis_url, "--run", "run"]


def test_status_counts_what_is_there(filled, client):
    found = json.loads(tool("status", *filled, "--json").stdout)
    streams = {s["name"]: s for s in found["streams"]}
    assert streams["tickets"]["entries"] == 3 and streams["tickets"]["claimed"] == 1
    assert streams["tickets"]["deliveries"] == 1
    assert streams["groups"]["entries"] == 2
    assert streams["groups"]["nbytes"] == client.memory_usage(KEYS.groups, samples=0)
    assert streams["quarantine"]["entries"] == found["set_aside"] == 1
    assert (found["cursor"], found["append_only"], found["policy"]) == (5, True, "noeviction")
    told = tool("status", *filled).stdout
    assert "3" in told and "quarantine" in told and "no limit, append-only file" in told


def test_peek_shows_every_token_and_no_control_character(filled, make_group, make_ticket):
    shown = tool("peek", *filled, "--ticket", "1")
    assert shown.returncode == 0, shown.stderr
    assert r"\x1b[2J[bold]</script>\u202egnp.exe\x07\n[/]" in shown.stdout
    assert r"judge: \x1b[2J[bold]</script>\u202egnp.exe\x07\n[/]" in shown.stdout
    assert all(c.isprintable() or c == "\n" for c in shown.stdout)
    group = make_group(make_ticket(1, prompt=HOSTILE))
    for t in group.trajectories:
        for logprob in t.behavior_logprobs.numpy():
            assert f"{logprob:.4f}" in shown.stdout
    facts = json.loads(tool("peek", *filled, "--ticket", "1", "--json").stdout)
    assert facts["prompt"] == HOSTILE
    assert [t["response_ids"] for t in facts["trajectories"]] == [
        t.response_ids.numpy().tolist() for t in group.trajectories
    ]
    assert facts["trajectories"][0]["spans"][1]["digest"] == "b1"
    assert facts["trajectories"][0]["reward_notes"] == {"judge": HOSTILE}


@pytest.mark.parametrize(
    "what, rows", [("groups", [0, 1]), ("tickets", [2, 3, 4]), ("eval", []), ("quarantine", [None])]
)
def test_peek_lists_each_kind(filled, what, rows):
    found = json.loads(tool("peek", *filled, "--what", what, "--json").stdout)
    assert [row.get("ticket") for row in found] == rows
    table = tool("peek", *filled, "--what", what).stdout
    assert all(c.isprintable() or c == "\n" for c in table)


@given(st.text())
def test_escaped_text_is_printable_and_says_what_it_was(text: str):
    out = escaped(text)
    assert out.isprintable()
    if text.isprintable():
        assert out == text


def test_an_export_is_a_log_and_imports_bit_for_bit(filled, client, tmp_path):
    before = [fields for _, fields in client.xrange(KEYS.groups)]
    exported = tool("export", *filled, "--to", str(tmp_path / "log"))
    assert exported.stdout.startswith("2 groups")
    refused(tool("export", *filled, "--to", str(tmp_path / "log")), "not empty")
    client.delete(KEYS.groups)
    assert tool("import", *filled, "--from", str(tmp_path / "log")).stdout.startswith(
        "2 groups imp"
    )
    assert [fields for _, fields in client.xrange(KEYS.groups)] == before
    again = tool("import", *filled, "--from", str(tmp_path / "log")).stdout
    assert again.startswith("0 groups imported, 2 passed over")


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_a_logged_group_is_in_redis_again_bit_for_bit(client, tmp_path_factory, data):
    client.delete(KEYS.groups)
    train, count = st.just("train"), data.draw(st.integers(1, 4))
    logged = [data.draw(groups(st.just(n), train)) for n in range(count)]
    directory = tmp_path_factory.mktemp("log")
    log = TrajectoryLog(directory)
    log.append(0, 0, logged)
    log.append(1, 1, logged[:1])  # used again by a sampler that replays
    log.close()
    added, passed = actions.import_groups(client, "run", directory)
    assert (added, passed) == (count, 1)
    assert [fields[b"record"] for _, fields in client.xrange(KEYS.groups)] == [
        encode(group) for group in logged
    ]


def test_refused_records_say_why_and_go_back_once_good(
    filled, client, redis_url, make_ticket, make_group
):
    [bad] = inspect_state.quarantine(client, "run")
    assert (bad.source, bad.record, bad.whole) == (KEYS.groups, b"\xc1 bad", True)
    stays = tool("requeue", *filled, "--all")
    assert stays.returncode == 1 and stays.stderr.startswith(f"stays: {bad.id}")
    refused(tool("requeue", *filled, "1-1"), "1-1", "not in the quarantine")
    refused(tool("requeue", *filled), "--all")
    # A record that today's reader takes: such as one of a newer schema, after an update.
    good = encode(make_group(make_ticket(7)))
    fields = {"source": KEYS.groups, "id": "1-0", "reason": "r", "bytes": len(good), "record": good}
    id = client.xadd(KEYS.quarantine, fields).decode()
    put_back = tool("requeue", *filled, id)
    assert put_back.returncode == 0, put_back.stderr
    assert client.xrevrange(KEYS.groups, count=1)[0][1] == {b"record": good}
    assert [r.id for r in inspect_state.quarantine(client, "run")] == [bad.id]


def test_what_redis_refuses_to_take_back_stays(filled, client, make_group, make_ticket):
    """The stream has its last id, which a worker may have given out: until the learner renames its entries."""
    good = encode(make_group(make_ticket(7)))
    fields = {"source": KEYS.groups, "id": "1-0", "reason": "r", "bytes": len(good), "record": good}
    id = client.xadd(KEYS.quarantine, fields).decode()
    client.xadd(KEYS.groups, {"record": b"junk"}, f"{2**64 - 1}-{2**64 - 1}")
    refused(tool("requeue", *filled, id), "redis refuses writes", "0 records were put back before")
    assert id in {record.id for record in inspect_state.quarantine(client, "run")}


def test_requeue_puts_no_record_into_another_stream(filled, client):
    [bad] = inspect_state.quarantine(client, "run")
    script = client.register_script(lua_scripts.REQUEUE)
    before = client.xlen(KEYS.tickets)

    assert script([KEYS.quarantine, KEYS.tickets], [bad.id]) == 0

    assert client.xlen(KEYS.tickets) == before
    assert client.xlen(KEYS.quarantine) == 1


def test_the_quarantine_is_bounded_and_cuts_long_records(client, redis_url, monkeypatch):
    learner = LearnerBuffer(redis_url, "run")
    for n in range(12):
        client.xadd(KEYS.groups, {"record": bytes([n]) * (8 << 20)})
    client.xadd(KEYS.groups, {"record": b"x" * (17 << 20)})
    assert learner.read(99, 0.0) == []
    kept = list(inspect_state.quarantine(client, "run"))
    assert learner.quarantined_total() == 13
    assert client.memory_usage(KEYS.quarantine, samples=0) <= 64 << 20
    assert (kept[-1].nbytes, len(kept[-1].record), kept[-1].whole) == (17 << 20, 64 << 10, False)
    assert kept[-2].record[:1] == b"\x0b" and kept[-2].whole
    assert "only 65536 of" in (actions.still_refused(kept[-1], KEYS) or "")
    bad = encode(make_ticket(prompt_ids=Array.of([], "int32")))
    ticket = replace(kept[-2], source=KEYS.tickets, record=bad, nbytes=len(bad))
    assert "prompt" in (actions.still_refused(ticket, KEYS) or "")
    learner.close()
    client.delete(KEYS.quarantine)


def test_purge_asks_first_and_spares_a_run_that_workers_are_at(filled, client, make_ticket):
    asked = tool("purge", *filled, input="n\n")
    assert asked.returncode == 1 and "1 entries of the quarantine" in asked.stdout
    assert client.xlen(KEYS.quarantine) == 1
    assert tool("purge", *filled, "--yes").stdout == "1 entries deleted\n"
    assert client.xlen(KEYS.quarantine) == 0
    last = client.xinfo_stream(KEYS.groups)["last-generated-id"]
    assert tool("purge", *filled, "--what", "groups", "--yes").stdout == "2 entries deleted\n"
    assert (
        client.xadd(KEYS.groups, {"record": b"x"}) > last
    )  # ids go on: no learner reads one twice
    client.sadd(KEYS.workers, "w")
    client.set(KEYS.worker("w"), b"beat")
    refused(tool("purge", *filled, "--what", "all", "--yes"), "workers are at work")
    client.delete(KEYS.worker("w"))
    assert tool("purge", *filled, "--what", "all", "--yes").returncode == 0
    assert client.keys(f"{KEYS.tag}*") == []


def test_wrong_places_are_one_line_and_exit_code_2(redis_url, tmp_path):
    refused(process("status"), "areal-q buffer: error:", "--redis URL and --run NAME")
    refused(tool("status", str(tmp_path / "none")), "none")
    refused(tool("status", "--redis", redis_url, "--run", "other"), "nothing of such a run")
    refused(tool("status", "--redis", f"unix://{tmp_path}/s", "--run", "run"), "redis")
    refused(tool("peek", "--redis", redis_url, "--run", "run", "--what", "x"), "--what x")
    refused(tool("import", "--redis", redis_url, "--run", "run", "--from", str(tmp_path)), "run")


def test_a_stopped_run_is_read_from_the_data_it_left(
    short_dir, tmp_path, make_run: Callable[..., Run], make_ticket, monkeypatch
):
    monkeypatch.delenv("REDIS_URL", raising=False)
    run = make_run('name="left"')
    (tmp_path / "config.toml").write_text(dump_toml(run))
    refused(tool("status", str(tmp_path)), "no Redis runs there")
    with (
        RedisServer.start(tmp_path / "redis", short_dir / "s") as server,
        closing(LearnerBuffer(server.url, "left")) as learner,
    ):
        learner.admit([make_ticket(0)], cursor=1)
    found = json.loads(tool("status", str(tmp_path), "--json").stdout)
    assert (found["run"], found["cursor"], found["streams"][0]["entries"]) == ("left", 1, 1)
