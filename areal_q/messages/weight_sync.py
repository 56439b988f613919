"""Messages of the weight sync over ZeroMQ: manifests, announcements, deltas, requests and replies."""

from typing import Any

import msgspec

from areal_q.messages.trajectories import MESSAGE_SCHEMA

MAX_CREDIT = 64
"""Most chunks that a worker may ask for ahead; the server's queue for one worker is sized by it."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a published version: `nbytes` bytes of the payload from `offset`.

    Example: model.layers.0.mlp.up_proj.weight in int8 is two of them, codes
    (`….weight`, int8 [384, 128]) and scales (`….weight_scale`, float32 [384, 1]).
    """

    name: str
    dtype: str
    """Type by torch's name without the prefix: int8, float32, bfloat16, float8_e4m3fn, uint8."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digest: str
    """xxh3-128 of the bytes, hexadecimal."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Noise N(0, sigma²), drawn from `seed`, that the published norms hold and the learner's do not (AQN,
    QeRL)."""

    sigma: float
    seed: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a version. Its digest covers every tensor and how an engine computes with them, so that two
    equal digests are equal policies.

    A version is any set of named tensors: codes, scales, KV scales, norms; adapters together with the frozen
    weights that they are added to, which no delta between versions then holds.
    """

    schema: int = MESSAGE_SCHEMA
    run: str
    run_id: str = ""
    """The id that tells runs of one name apart; "" where the learner does not say it."""
    epoch: str
    """Changes whenever a learner starts, so that a version number is never reused for other weights."""
    version: int
    format: str
    uaq_scale: float
    model: dict[str, Any]
    """The model's Hugging Face `config.json`: enough to build the engine's model."""
    tensors: list[TensorSpec]
    nbytes: int
    digest: str
    """xxh3-128 over the names, dtypes, shapes and digests of all tensors, and over format, uaq_scale, model,
    noise and extra, hexadecimal."""
    published_s: float
    noise: Noise | None = None
    extra: dict[str, Any] = {}
    """Small facts that belong to the tensors: numbers, words, lists of them."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag="announce"):
    """PUB: says that version `version` can be fetched; repeated as a heartbeat for those who join late."""

    run: str
    run_id: str = ""
    """The run's id; "" where the sender does not say it."""
    epoch: str
    version: int
    digest: str


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """PUB: announces `version`, and the message's second frame turns version `base` of the same epoch
    into it (areal_q/weights/delta.py). It is sent once; whoever misses it fetches."""

    run: str
    run_id: str = ""
    """The run's id; "" where the sender does not say it."""
    epoch: str
    version: int
    digest: str
    base: int
    base_digest: str


class FetchManifest(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_manifest"):
    """DEALER → ROUTER: asks for the newest version's manifest."""


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_chunk"):
    """DEALER → ROUTER: asks for `nbytes` from `offset` of the payload, or deltas, that hash to `digest`."""

    digest: str
    offset: int
    nbytes: int
    shared: bool = False
    """True if the worker has opened the payload's SharedFile and needs leave to read, not the bytes."""


class FetchDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_deltas"):
    """DEALER → ROUTER: asks for the deltas that lead from version `base` of `epoch` to the newest."""

    epoch: str
    base: int
    base_digest: str


class FetchHeld(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_held"):
    """DEALER → ROUTER: asks which versions the server remembers."""


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a payload, for processes of the server's host (areal_q/weights/shared_memory.py)."""

    pid: int
    """Number of the process that has it."""
    fd: int
    """Number of the file in that process."""
    name: str
    """The file's name, which tells it from any other."""


class ManifestReply(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """ROUTER → DEALER: answers with the newest version's manifest."""

    manifest: bytes | None
    """An encoded Manifest; None before the first version."""
    checksum: str = ""
    """xxh3-128 of the encoded manifest, hexadecimal; the manifest's own digest covers the tensors only."""
    shared: SharedFile | None = None
    """The payload's memory, for workers of this host; None if there is only the socket."""


class DeltasReply(msgspec.Struct, frozen=True, kw_only=True, tag="deltas"):
    """ROUTER → DEALER: answers with deltas to apply one after the other, none where a snapshot must be fetched.

    Their bytes, one after the other, are fetched in chunks like a version's, under `digest`.
    """

    deltas: list[Delta] = []
    sizes: list[int] = []
    """Bytes of each delta."""
    digest: str = ""
    """xxh3-128 of the deltas' bytes, one after the other, hexadecimal."""


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a learner or relay remembers."""

    epoch: str
    version: int
    digest: str
    format: str
    nbytes: int
    """Bytes of its payload."""
    held: bool
    """True while the payload can still be fetched."""
    delta_bytes: int | None
    """Bytes of the delta from the version before; None where there is none any more, or never was."""
    base: int | None
    base_digest: str | None
    published_s: float


class HeldReply(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """ROUTER → DEALER: answers with what the server remembers and has counted."""

    versions: list[HeldVersion]
    """The versions remembered, oldest first."""
    stats: dict[str, int]
    """Numbers that the server counted since it started (buffer/weight_sync/stats.py)."""


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """ROUTER → DEALER: answers with a chunk, whose bytes are the message's second frame."""

    digest: str
    offset: int
    nbytes: int
    shared: bool = False
    """True if there is no second frame: the chunk may be read in the payload's SharedFile now."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """ROUTER → DEALER: says that what hashes to `digest` is no longer held."""

    digest: str


Broadcast = Announce | Delta
"""What is sent to everybody."""
FetchRequest = FetchManifest | FetchDeltas | FetchChunk | FetchHeld
"""What a worker may ask."""
FetchReply = ManifestReply | DeltasReply | ChunkReply | HeldReply | Gone
"""What a worker may be answered."""
