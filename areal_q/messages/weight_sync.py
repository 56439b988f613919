"""Versions of weights on their way over ZeroMQ: manifests, announcements, deltas, requests and replies."""

from typing import Any

import msgspec

from areal_q.messages.trajectories import MESSAGE_SCHEMA

MAX_CREDIT = 64
"""Chunks that a worker may ask for ahead; the learner's queue for one worker is sized by it."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a published version: `nbytes` bytes of the payload from `offset`.

    Example: model.layers.0.mlp.up_proj.weight in int8 is two of them, codes
    (`….weight`, int8 [384, 128]) and scales (`….weight_scale`, float32 [384, 1]).
    """

    name: str
    dtype: str
    """torch's name without the prefix: int8, float32, bfloat16, float8_e4m3fn, uint8"""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    """xxh3-128 of the bytes, hexadecimal"""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """AQN: the published norms hold noise N(0, sigma²) drawn from `seed` (QeRL); the learner's do not."""

    sigma: float
    seed: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a version consists of. Its digest covers every tensor, so two equal digests are equal weights.

    A version is any set of named tensors: codes, scales, KV scales, norms; adapters together with the frozen
    weights that they are added to, which no delta between versions then holds.
    """

    schema: int = MESSAGE_SCHEMA
    run: str
    epoch: str
    """Changes whenever a learner starts, so that a version number is never reused for other weights."""
    version: int
    format: str
    uaq_scale: float
    model: dict[str, Any]
    """Hugging Face `config.json`: enough to build the engine's model."""
    tensors: list[TensorSpec]
    nbytes: int
    digest: str
    """xxh3-128 over the names, dtypes, shapes and digests of all tensors, hexadecimal"""
    published_s: float
    noise: Noise | None = None
    extra: dict[str, Any] = {}
    """Small facts that an engine needs beside the tensors: numbers, words, lists of them"""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag="announce"):
    """PUB: version `version` can be fetched. Repeated as a heartbeat, so a late subscriber learns of it."""

    run: str
    epoch: str
    version: int
    digest: str


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """PUB: announces `version`, and the message's second frame turns version `base` of the same epoch
    into it (areal_q/weights/delta.py). Sent once; whoever misses it fetches."""

    run: str
    epoch: str
    version: int
    digest: str
    base: int
    base_digest: str


class FetchManifest(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_manifest"):
    """DEALER → ROUTER: the manifest of the newest version, please."""


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_chunk"):
    """DEALER → ROUTER: `nbytes` from `offset` of what hashes to `digest`: a version's payload, or deltas."""

    digest: str
    offset: int
    nbytes: int


class FetchDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_deltas"):
    """DEALER → ROUTER: what leads from version `base` of `epoch` to the newest, please."""

    epoch: str
    base: int
    base_digest: str


class FetchHeld(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_held"):
    """DEALER → ROUTER: which versions do you remember?"""


class ManifestReply(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """ROUTER → DEALER: the newest version, or None before the first."""

    manifest: bytes | None
    """An encoded Manifest"""
    checksum: str = ""
    """xxh3-128 of it, hexadecimal: the manifest's own digest covers the tensors only"""


class DeltasReply(msgspec.Struct, frozen=True, kw_only=True, tag="deltas"):
    """ROUTER → DEALER: deltas to apply one after the other. None at all: fetch the manifest instead.

    Their bytes, one after the other, are fetched in chunks like a version's, under `digest`.
    """

    deltas: list[Delta] = []
    sizes: list[int] = []
    """Bytes of each"""
    digest: str = ""
    """xxh3-128 of all of them, hexadecimal"""


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a learner or relay remembers."""

    epoch: str
    version: int
    digest: str
    format: str
    nbytes: int
    """Of its payload"""
    held: bool
    """Whether the payload can still be fetched"""
    delta_bytes: int | None
    """From the version before; None where there is no such delta any more, or never was"""
    base: int | None
    base_digest: str | None
    published_s: float


class HeldReply(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """ROUTER → DEALER: the versions remembered, oldest first."""

    versions: list[HeldVersion]
    stats: dict[str, int]
    """What the server counted since it started (buffer/weight_sync/stats.py)"""


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """ROUTER → DEALER: the header of a chunk; its bytes are the message's second frame."""

    digest: str
    offset: int
    nbytes: int


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """ROUTER → DEALER: what `digest` names is no longer held; ask what there is instead."""

    digest: str


Broadcast = Announce | Delta
FetchRequest = FetchManifest | FetchDeltas | FetchChunk | FetchHeld
FetchReply = ManifestReply | DeltasReply | ChunkReply | HeldReply | Gone
