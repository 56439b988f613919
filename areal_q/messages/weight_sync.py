"""Messages of the weight sync over ZeroMQ: manifests, announcements, deltas, requests and replies."""

from typing import Annotated, Any

import msgspec

from areal_q.messages.trajectories import MESSAGE_SCHEMA, Bounded, Finite, Name, Natural, Sentence

MAX_CREDIT = 64
"""Most chunks that a worker may ask for ahead; the server's queue for one worker is sized by it."""
Shape = Annotated[tuple[Natural, ...], msgspec.Meta(max_length=16)]
"""The sizes of a tensor, of more dimensions than any has: a liar's would be multiplied for minutes."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a published version: `nbytes` bytes of the payload from `offset`.

    Example: model.layers.0.mlp.up_proj.weight in int8 is two of them, codes
    (`….weight`, int8 [384, 128]) and scales (`….weight_scale`, float32 [384, 1]).
    """

    name: Sentence
    dtype: Name
    """Type by torch's name without the prefix: int8, float32, bfloat16, float8_e4m3fn, uint8."""
    shape: Shape
    offset: Natural
    nbytes: Natural
    digest: Name
    """xxh3-128 of the bytes, hexadecimal."""


class Noise(msgspec.Struct, frozen=True, kw_only=True):
    """Noise N(0, sigma²), drawn from `seed`, that the published norms hold and the learner's do not (AQN,
    QeRL)."""

    sigma: Finite
    seed: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a version. Its digest covers its number, every tensor and how an engine computes with them, so
    that two equal digests are equal policies under one number.

    A version is any set of named tensors: codes, scales, KV scales, norms; adapters together with the frozen
    weights that they are added to, which no delta between versions then holds.
    """

    schema: int = MESSAGE_SCHEMA
    run: Name
    run_id: Name = ""
    """The id that tells runs of one name apart; "" where the learner does not say it."""
    epoch: Name
    """Changes whenever a learner starts, so that a version number is never reused for other weights."""
    version: Natural
    format: Name
    uaq_scale: Finite
    model: dict[str, Any]
    """The model's Hugging Face `config.json`: enough to build the engine's model."""
    tensors: list[TensorSpec]
    nbytes: Natural
    digest: Name
    """xxh3-128 over the names, dtypes, shapes and digests of all tensors, and over version, format, uaq_scale,
    model, noise and extra, hexadecimal."""
    published_s: Finite
    noise: Noise | None = None
    extra: dict[str, Any] = {}
    """Small facts that belong to the tensors: numbers, words, lists of them."""


class Announce(msgspec.Struct, frozen=True, kw_only=True, tag="announce"):
    """PUB: says that version `version` can be fetched; repeated as a heartbeat for those who join late."""

    run: Name
    run_id: Name = ""
    """The run's id; "" where the sender does not say it."""
    epoch: Name
    version: Natural
    digest: Name


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """PUB: announces `version`, and the message's second frame turns version `base` of the same epoch
    into it (areal_q/weights/delta.py). It is sent once; whoever misses it fetches."""

    run: Name
    run_id: Name = ""
    """The run's id; "" where the sender does not say it."""
    epoch: Name
    version: Natural
    digest: Name
    base: Natural
    base_digest: Name


class FetchManifest(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_manifest"):
    """DEALER → ROUTER: asks for the newest version's manifest."""


class FetchChunk(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_chunk"):
    """DEALER → ROUTER: asks for `nbytes` from `offset` of the payload, or deltas, that hash to `digest`."""

    digest: Name
    offset: Natural
    nbytes: Natural
    shared: bool = False
    """True if the worker has opened the payload's SharedFile and needs leave to read, not the bytes."""


class FetchDeltas(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_deltas"):
    """DEALER → ROUTER: asks for the deltas that lead from version `base` of `epoch` to the newest."""

    epoch: Name
    base: Natural
    base_digest: Name


class FetchHeld(msgspec.Struct, frozen=True, kw_only=True, tag="fetch_held"):
    """DEALER → ROUTER: asks which versions the server remembers."""


class SharedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The memory of a payload, for processes of the server's host (areal_q/weights/shared_memory.py)."""

    pid: int
    """Number of the process that has it."""
    fd: int
    """Number of the file in that process."""
    name: Name
    """The file's name, which tells it from any other."""


class ManifestReply(msgspec.Struct, frozen=True, kw_only=True, tag="manifest"):
    """ROUTER → DEALER: answers with the newest version's manifest."""

    manifest: bytes | None
    """An encoded Manifest; None before the first version."""
    checksum: Name = ""
    """xxh3-128 of the encoded manifest, hexadecimal; the manifest's own digest does not cover all of it."""
    shared: SharedFile | None = None
    """The payload's memory, for workers of this host; None if there is only the socket."""


class DeltasReply(msgspec.Struct, frozen=True, kw_only=True, tag="deltas"):
    """ROUTER → DEALER: answers with deltas to apply one after the other, none where a snapshot must be fetched.

    Their bytes, one after the other, are fetched in chunks like a version's, under `digest`.
    """

    deltas: list[Delta] = []
    sizes: list[Natural] = []
    """Bytes of each delta."""
    digest: Name = ""
    """xxh3-128 of the deltas' bytes, one after the other, hexadecimal."""


class HeldVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a learner or relay remembers."""

    epoch: Name
    version: Natural
    digest: Name
    format: Name
    nbytes: Natural
    """Bytes of its payload."""
    held: bool
    """True while the payload can still be fetched."""
    delta_bytes: Natural | None
    """Bytes of the delta from the version before; None where there is none any more, or never was."""
    base: Natural | None
    base_digest: Name | None
    published_s: Finite


class HeldReply(msgspec.Struct, frozen=True, kw_only=True, tag="held"):
    """ROUTER → DEALER: answers with what the server remembers and has counted."""

    versions: list[HeldVersion]
    """The versions remembered, oldest first."""
    stats: dict[Name, Bounded]
    """Numbers that the server counted since it started (buffer/weight_sync/stats.py)."""


class ChunkReply(msgspec.Struct, frozen=True, kw_only=True, tag="chunk"):
    """ROUTER → DEALER: answers with a chunk, whose bytes are the message's second frame."""

    digest: Name
    offset: Natural
    nbytes: Natural
    shared: bool = False
    """True if there is no second frame: the chunk may be read in the payload's SharedFile now."""


class Gone(msgspec.Struct, frozen=True, kw_only=True, tag="gone"):
    """ROUTER → DEALER: says that what hashes to `digest` is no longer held."""

    digest: Name


Broadcast = Announce | Delta
"""What is sent to everybody."""
FetchRequest = FetchManifest | FetchDeltas | FetchChunk | FetchHeld
"""What a worker may ask."""
FetchReply = ManifestReply | DeltasReply | ChunkReply | HeldReply | Gone
"""What a worker may be answered."""
