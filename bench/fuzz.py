"""Every decoder of what comes from a socket or a file, under mutated inputs: `make fuzz`.

    python -m bench.fuzz --count 100000 [--only delta] [--seed 1]

An input is a sound record with bytes changed, cut out, repeated or spliced, or, where it is msgpack, JSON or
TOML, with values of its tree replaced, dropped or doubled. A decoder may take it, or refuse it with one of the
errors named here; anything else (another exception, a crash) is a finding, printed with the input. Exit code 1
where there was one.
"""

import argparse
import copy
import json
import multiprocessing
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import tomli_w
import torch
from safetensors.torch import save_file

from areal_q import messages
from areal_q.config import Run, dump_toml, load
from areal_q.errors import (
    CheckpointError,
    ConfigError,
    RecordError,
    WeightVersionError,
)
from areal_q.messages import (
    Group,
    PartialGroup,
    PartialResponse,
    Trajectory,
    VersionSpan,
    encode,
)
from areal_q.models import DecoderConfig, load_config, load_decoder
from areal_q.observability.metrics_log import read_metrics
from areal_q.system.run_dir import METRICS_FILE
from areal_q.weights import delta, version
from bench.records import make_beat, make_group, make_ticket, make_trajectory
from buffer.logs.step_log import StepLog, StepRecord, iter_steps
from buffer.logs.trajectory_log import TrajectoryLog, iter_log
from learner import checkpoint

INTERESTING = (
    *(0, -1, 1, 2**31, 2**32, 2**53, 2**63 - 1, -(2**63), 2**64 - 1, 0.5, -0.0, 1e308),
    *(
        float("nan"),
        float("inf"),
        True,
        False,
        None,
        "",
        "\x00",
        "é" * 40,
        "int8",
        b"",
        b"\xff" * 9,
    ),
    *([], {}, [[[[]]]], {"": {}}, [0] * 50),
)
PART = 50
"""Inputs for one process of its own"""
SMALL_MODEL = json.dumps(
    DecoderConfig(
        family="qwen3", vocab_size=20, width=8, layers=1, heads=2, kv_heads=1, head_dim=4, mlp=8,
        max_positions=16, eos_ids=(0,),
    ).to_hf()
).encode()  # fmt: skip


@dataclass(frozen=True)
class Target:
    """A decoder, sound inputs for it, and what it may raise."""

    name: str
    decode: Callable[[bytes], Any]
    seeds: list[bytes]
    refusals: tuple[type[Exception], ...]
    tree: str = ""
    """msgpack, json or toml: how a tree is read from an input, and written again"""
    share: float = 1.0
    apart: bool = False
    """In processes of its own: a library in C++ may end the process on a file that somebody forged"""
    """Of the count: less where an input takes milliseconds"""


def _group() -> Group:
    spans = [VersionSpan(0, 1, "a" * 32), VersionSpan(1, 2, "b" * 32)]
    answers = [
        make_trajectory(
            i,
            [5, 6, 7],
            [-0.1, -0.2, -0.3],
            spans=spans,
            reward=float(i),
            reward_parts={"correct": 1.0},
        )
        for i in range(2)
    ]
    return make_group(make_ticket(7, seed=1), trajectories=answers)


def _versions() -> list[version.WeightVersion]:
    made = []
    for number in range(3):
        generator = torch.Generator().manual_seed(0)
        codes = torch.randint(-128, 128, (40, 20), generator=generator, dtype=torch.int8)
        codes.view(-1)[number :: 50 - 20 * number] += 1
        tensors = {"codes": codes, "scales": torch.full((40, 1), 0.5 + number), "none": codes[:0]}
        made.append(
            version.pack_version(
                tensors,
                run="run",
                epoch="a",
                version=number,
                format="int8",
                uaq_scale=1.5,
                model={"hidden_size": 20},
                published_s=1.0,
            )
        )
    return made


def targets(place: Path) -> Iterator[Target]:
    """All of them; files are written below `place`."""
    yield from _message_targets()
    yield from _delta_targets()
    yield from _text_targets(place)
    yield from _file_targets(place)


def _message_targets() -> Iterator[Target]:
    group, (old, new, _) = _group(), _versions()
    body = delta.diff(old, new) or b""
    told = messages.Delta(run="run", epoch="a", version=1, digest="d", base=0, base_digest="c")
    announce = messages.Announce(run="run", epoch="a", version=1, digest="d")
    file = messages.SharedFile(pid=1, fd=3, name=f"areal-q-{0:032x}")
    requests = [
        messages.FetchManifest(),
        messages.FetchChunk(digest="d" * 32, offset=0, nbytes=64, shared=True),
        messages.FetchDeltas(epoch="a", base=0, base_digest="d"),
        messages.FetchHeld(),
    ]
    replies = [
        messages.ManifestReply(manifest=encode(new.manifest), checksum="0" * 32, shared=file),
        messages.DeltasReply(deltas=[told], sizes=[len(body)], digest="d"),
        messages.ChunkReply(digest="d", offset=0, nbytes=64, shared=True),
        messages.Gone(digest="d"),
    ]
    beat = make_beat(tokens_per_s=0.5, tokens=1)

    def manifest(data: bytes) -> None:
        version.check_version(messages.decode_manifest(data))

    refused = (RecordError,)
    yield Target("ticket", _ticket, [encode(group.ticket)], refused, "msgpack")
    yield Target(
        "group", lambda d: messages.decode_group(d).validate(), [encode(group)], refused, "msgpack"
    )
    partial = PartialGroup(ticket=7, responses=[_partial(t) for t in group.trajectories])
    yield Target("partial group", _partials, [encode(partial)], refused, "msgpack")
    yield Target("heartbeat", messages.decode_status, [encode(beat)], refused, "msgpack")
    yield Target(
        "broadcast", messages.decode_broadcast, [encode(told), encode(announce)], refused, "msgpack"
    )
    yield Target(
        "fetch request", messages.decode_request, [*map(encode, requests)], refused, "msgpack"
    )
    yield Target("fetch reply", messages.decode_reply, [*map(encode, replies)], refused, "msgpack")
    both = (RecordError, WeightVersionError)
    yield Target("manifest", manifest, [encode(new.manifest)], both, "msgpack")


def _partial(t: Trajectory) -> PartialResponse:
    names = ("response_ids", "behavior_logprobs", "loss_mask", "spans", "finish_reason")
    known = {name: getattr(t, name) for name in names}
    return PartialResponse(**known, turns=1, pending=1, ended=False)


def _partials(data: bytes) -> None:
    for response in messages.decode_partial(data).responses:
        response.validate(_group().ticket)


def _ticket(data: bytes) -> None:
    messages.decode_ticket(data).prompt_ids.numpy()


def _delta_targets() -> Iterator[Target]:
    first, second, third = _versions()
    bodies = [delta.diff(first, second) or b"", delta.diff(second, third) or b""]
    payload = torch.empty(first.manifest.nbytes, dtype=torch.uint8)
    refused = (RecordError, WeightVersionError)
    yield Target("delta", lambda d: delta.apply(first, d, payload), bodies, refused, "msgpack", 0.5)
    counted: Callable[[bytes], Any] = lambda d: delta.changed(second.manifest, d)  # noqa: E731
    yield Target("delta, counted", counted, bodies, refused, "msgpack", 0.5)


def _from_file(path: Path, read: Callable[[], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> None:
        path.write_bytes(data)
        read()

    return decode


def _text_targets(place: Path) -> Iterator[Target]:
    model = place / "model"
    model.mkdir()
    state = checkpoint.State(
        step=3, position="1-0", cursor=9, outstanding=[7, 8], digests={3: "d"}, updates=6, skipped=0
    )

    toml = _from_file(place / "x.toml", lambda: load(place / "x.toml"))
    yield Target("settings, TOML", toml, [dump_toml(Run()).encode()], (ConfigError,), "toml", 0.3)
    where = place / checkpoint.STATE
    read_state = _from_file(where, lambda: checkpoint.read_state(place))
    sound = [msgspec.json.encode(state)]
    yield Target("checkpoint state", read_state, sound, (CheckpointError,), "json", 0.5)
    read_config = _from_file(model / "config.json", lambda: load_config(model))
    yield Target("config.json", read_config, [SMALL_MODEL], (CheckpointError,), "json", 0.5)
    read = _from_file(place / METRICS_FILE, lambda: read_metrics(place / METRICS_FILE))
    line = b'{"kind":"step","step":12,"elapsed_s":61.2,"time_s":1.5,"reward/mean":0.63}\n'
    yield Target("metrics.jsonl", read, [line * 3], (RecordError,), "", 0.3)


def _file_targets(place: Path) -> Iterator[Target]:
    groups, steps = place / "trajectories", place / "steps"
    log, record = TrajectoryLog(groups), StepLog(steps)
    for step in range(2):
        log.append(step, step, [_group()])
        record.append(
            StepRecord(
                step=step, tickets=[7], seeds=[1], base_digest="a", digest="b", fork=0, settings="",
                machine="", metrics={"train/loss": 0.5},
            )
        )  # fmt: skip
    log.close()
    record.close()

    def part(
        directory: Path, read: Callable[[], Any]
    ) -> tuple[Callable[[bytes], Any], list[bytes]]:
        path = directory / "part-000000.parquet"
        return _from_file(path, read), [path.read_bytes()]

    refused = (RecordError,)
    yield Target(
        "trajectory log",
        *part(groups, lambda: list(iter_log(groups))),
        refused,
        "",
        0.05,
        apart=True,
    )
    yield Target(
        "step log", *part(steps, lambda: list(iter_steps(steps))), refused, "", 0.05, apart=True
    )
    model = place / "whole"
    model.mkdir()
    (model / "config.json").write_bytes(SMALL_MODEL)
    tensors = {"model.norm.weight": torch.ones(8), "model.embed_tokens.weight": torch.ones(20, 8)}
    save_file(tensors, model / "model.safetensors")
    decoder = _from_file(model / "model.safetensors", lambda: load_decoder(model))
    sound = [(model / "model.safetensors").read_bytes()]
    yield Target("safetensors", decoder, sound, (CheckpointError,), "", 0.1)


def mutated(target: Target, rng: random.Random) -> bytes:
    data = rng.choice(target.seeds)
    if target.tree and rng.random() < 0.5:
        with suppress(ValueError):  # a seed that another mutation has broken is no tree
            return _written(target.tree, _other_tree(_read(target.tree, data), rng))
    return _other_bytes(data, rng.choice(target.seeds), rng)


def _other_bytes(data: bytes, other: bytes, rng: random.Random) -> bytes:
    out = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4, 16))):
        at = rng.randrange(len(out) + 1)
        end = min(len(out), at + rng.choice((1, 1, 2, 4, 8, 100)))
        match rng.randrange(7):
            case 0 if at < len(out):
                out[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(out):
                out[at] = rng.choice((0, 1, 127, 128, 255, rng.randrange(256)))
            case 2:
                del out[at:end]
            case 3:
                out[at:at] = out[at:end] * rng.randint(1, 3)
            case 4:
                out[at:at] = rng.randbytes(end - at)
            case 5:
                out[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                del out[at:]
    return bytes(out)


def _other_tree(tree: Any, rng: random.Random) -> Any:
    """A copy with one to three nodes changed."""
    for _ in range(rng.randint(1, 3)):
        spots = list(_spots(tree))
        if not spots:
            return copy.deepcopy(rng.choice(INTERESTING))
        holder, key = rng.choice(spots)
        match rng.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, dict):
                holder[rng.choice(("x", "", "type", "schema"))] = copy.deepcopy(
                    rng.choice(INTERESTING)
                )
            case 2:
                holder[key] = [copy.deepcopy(holder[key]) for _ in range(rng.randrange(4))]
            case 3 if isinstance(holder[key], bytes):
                holder[key] = _other_bytes(holder[key], holder[key], rng)
            case _:
                holder[key] = copy.deepcopy(rng.choice(INTERESTING))
    return tree


def _spots(tree: Any) -> Iterator[tuple[Any, Any]]:
    if isinstance(tree, dict | list):
        for key in list(tree) if isinstance(tree, dict) else range(len(tree)):
            yield tree, key
            yield from _spots(tree[key])


def _read(kind: str, data: bytes) -> Any:
    if kind == "msgpack":
        return msgspec.msgpack.decode(data)
    return json.loads(data) if kind == "json" else msgspec.toml.decode(data)


def _written(kind: str, tree: Any) -> bytes:
    if kind == "msgpack":
        return msgspec.msgpack.encode(tree)
    if kind == "json":
        return json.dumps(tree, default=str).encode()
    return tomli_w.dumps(_without_none(tree) if isinstance(tree, dict) else {}).encode()


def _without_none(value: Any) -> Any:
    """TOML has no null, and no bytes."""
    if isinstance(value, dict):
        return {str(k): _without_none(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_without_none(v) for v in value]
    return "" if value is None or isinstance(value, bytes) else value


@dataclass
class Count:
    inputs: int = 0
    taken: int = 0
    seconds: float = 0.0
    slowest_s: float = 0.0
    aborts: int = 0
    """Processes that a library ended"""


def fuzz(target: Target, count: int, seed: int) -> tuple[Count, list[str]]:
    """(what was counted, findings) of up to `count` inputs; stops at the fifth finding."""
    rng, counted, found = random.Random(f"{target.name}/{seed}"), Count(), []
    began = time.monotonic()
    while counted.inputs < count and len(found) < 5:
        data = mutated(target, rng)
        started = time.monotonic()
        try:
            target.decode(data)
            counted.taken += 1
        except target.refusals:
            pass
        except Exception as error:  # any other is what is looked for
            found.append(f"{target.name}: {type(error).__name__}: {error}: {data[:4000]!r}")
        counted.inputs += 1
        counted.slowest_s = max(counted.slowest_s, time.monotonic() - started)
    counted.seconds = time.monotonic() - began
    return counted, found


def fuzz_apart(target: Target, count: int, seed: int) -> tuple[Count, list[str]]:
    """`fuzz` in one child after the other, so that an abort costs 50 inputs and is counted."""
    total, findings, began = Count(), [], time.monotonic()
    fork = multiprocessing.get_context("fork")
    for part in range(-(-count // PART)):
        here, there = fork.Pipe(duplex=False)

        def work(part: int = part, there: Any = there) -> None:
            there.send(fuzz(target, PART, seed * 10**6 + part))

        child = fork.Process(target=work)
        child.start()
        there.close()
        try:
            counted, found = here.recv()
        except EOFError:
            counted, found = Count(inputs=PART, aborts=1), []
        child.join()
        findings += found
        total.inputs += counted.inputs
        total.taken += counted.taken
        total.aborts += counted.aborts
        total.slowest_s = max(total.slowest_s, counted.slowest_s)
        if len(findings) >= 5:
            break
    total.seconds = time.monotonic() - began
    return total, findings


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz")
    parser.add_argument("--count", type=int, default=100_000, help="for the fast decoders")
    parser.add_argument("--only", default="", help="decoders with this in their name")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    np.seterr(all="ignore")
    total, findings = 0, []
    print("| decoder | inputs | taken | seconds | slowest | aborts |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="aq-fuzz-") as place:
        for target in targets(Path(place)):
            if args.only in target.name:
                run = fuzz_apart if target.apart else fuzz
                counted, found = run(target, round(args.count * target.share), args.seed)
                slowest = f"{counted.slowest_s * 1e3:.1f} ms"
                numbers = (f"{counted.inputs:,}", f"{counted.taken:,}", f"{counted.seconds:.0f}")
                print(
                    f"| {target.name} | {' | '.join(numbers)} | {slowest} | {counted.aborts} |",
                    flush=True,
                )
                findings += found
                total += counted.inputs
    print(f"\n{total:,} inputs, {len(findings)} findings")
    print("\n".join(findings))
    sys.exit(bool(findings))


if __name__ == "__main__":
    main()
