"""A published version of the weights: manifest, payload, and the hashes that tie them together.

The payload is the tensors' raw bytes, each at a 64-byte boundary, exactly as the engine will use
them. Pure: the sockets are in buffer/weight_sync/.
"""

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from areal_q.errors import WeightVersionError
from areal_q.messages import Manifest, Noise, TensorSpec
from areal_q.weights import shared_memory

ALIGNMENT = 64
"""Bytes at a multiple of which every tensor begins in the payload."""

DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.bool,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.float8_e8m0fnu,
        torch.float16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
}


@dataclass(frozen=True)
class WeightVersion:
    """A complete, verified version."""

    manifest: Manifest
    payload: torch.Tensor
    """The bytes of all tensors, uint8 [manifest.nbytes]."""
    tensors: Mapping[str, torch.Tensor]
    """The tensors by name: views of the payload, not to be written to."""


class PayloadPool:
    """Lends buffers for payloads, and reuses each when the last tensor that views it has been freed.

    Nobody has to return a buffer, and an engine may keep its views for any time. If no buffer is free, a new
    one is allocated, and at most `spare` free ones are kept. Reuse saves time: the first access to new memory
    is many times slower than copying, and freeing it holds the interpreter lock (25 ms for 256 MiB).

    The pool is thread-safe, since tensors may be freed on any thread.
    """

    def __init__(self, spare: int = 2, *, shared: bool = False) -> None:
        """Other processes of this host can read the buffers if `shared`."""
        self._shared = shared
        self._free: deque[torch.Tensor] = deque(maxlen=spare)
        self.made = 0
        """Number of buffers allocated so far."""

    def lend(self, nbytes: int) -> torch.Tensor:
        """Returns a buffer of uint8 [nbytes] with arbitrary content. Raises WeightVersionError if there is no
        memory for it."""
        if nbytes == 0:  # torch.from_numpy gives an empty array a stride that no view accepts
            return torch.empty(0, dtype=torch.uint8)
        memory = self._take(nbytes)
        # torch.from_numpy keeps exactly this array alive as long as a view of its storage exists.
        array = memory.numpy()
        weakref.finalize(array, self._free.append, memory).atexit = False
        return torch.from_numpy(array)

    def _take(self, nbytes: int) -> torch.Tensor:
        while self._free:
            try:
                memory = self._free.popleft()
            except IndexError:
                break
            if memory.numel() == nbytes:
                return memory
        self.made += 1
        try:
            if self._shared:
                return shared_memory.allocate(nbytes)
            # Not written to here, so that a size which somebody only claims takes no memory.
            return torch.empty(nbytes, dtype=torch.uint8)
        except (OSError, RuntimeError) as error:
            raise WeightVersionError(f"there is no memory for {nbytes:,} bytes") from error


def pack_version(
    tensors: Mapping[str, torch.Tensor],
    *,
    run: str,
    epoch: str,
    version: int,
    format: str,
    uaq_scale: float,
    model: dict[str, Any],
    published_s: float,
    run_id: str = "",
    noise: Noise | None = None,
    extra: dict[str, Any] | None = None,
    pool: PayloadPool | None = None,
) -> WeightVersion:
    """Copies `tensors` into one payload and returns it with its manifest; names keep the order given.

    The other fields are the manifest's. A `pool` lets payloads be reused from version to version. Raises
    WeightVersionError for a dtype that is not in DTYPES.
    """
    layout = [*_layout(tensors)]
    end = layout[-1].offset + layout[-1].nbytes if layout else 0
    payload = (pool or PayloadPool()).lend(end)
    specs = []
    for spec, tensor in zip(layout, tensors.values(), strict=True):
        after = spec.offset + spec.nbytes
        raw = payload[spec.offset : after]
        raw.copy_(tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8))
        payload[after : _aligned(after)].zero_()
        digest = xxhash.xxh3_128_hexdigest(raw.numpy().data)
        specs.append(msgspec.structs.replace(spec, digest=digest))
    manifest = Manifest(
        run=run, run_id=run_id, epoch=epoch, version=version, format=format, uaq_scale=uaq_scale, model=model,
        tensors=specs, nbytes=end, digest="", published_s=published_s, noise=noise, extra=extra or {},
    )  # fmt: skip
    manifest = msgspec.structs.replace(manifest, digest=digest_of(manifest))
    return WeightVersion(manifest, payload, _views(manifest, payload))


def _layout(tensors: Mapping[str, torch.Tensor]) -> Iterator[TensorSpec]:
    """Yields where each tensor goes, without its digest."""
    end = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES.values():
            raise WeightVersionError(f"{name} has dtype {tensor.dtype}, which cannot be published")
        yield TensorSpec(
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            offset=_aligned(end),
            nbytes=tensor.nbytes,
            digest="",
        )
        end = _aligned(end) + tensor.nbytes


def unpack_version(manifest: Manifest, payload: torch.Tensor) -> WeightVersion:
    """Returns the version that `manifest` describes, made of received bytes: uint8 [manifest.nbytes].

    Raises WeightVersionError if any byte of a tensor differs. The bytes between two tensors (padding)
    belong to nobody and are not checked.
    """
    verifier = Verifier(manifest, payload)
    verifier.advance(manifest.nbytes)
    return verifier.finish()


def unpack_unnamed(
    manifest: Manifest, payload: torch.Tensor, fill: Callable[[int], None]
) -> WeightVersion:
    """Returns the version where the manifest lacks the tensors' own digests: they are computed and filled in.

    `fill` is called with the index of each tensor, to write its bytes into the payload; they are hashed at
    once, while they are in the CPU's cache. The version's digest covers them all; raises WeightVersionError if
    it differs.
    """
    if payload.dtype != torch.uint8 or payload.numel() != manifest.nbytes:
        raise WeightVersionError(
            f"version {manifest.version}: {payload.numel()} of {manifest.nbytes} bytes"
        )
    raw, specs = payload.numpy().data, []
    for index, s in enumerate(manifest.tensors):
        fill(index)
        digest = xxhash.xxh3_128_hexdigest(raw[s.offset : s.offset + s.nbytes])
        specs.append(msgspec.structs.replace(s, digest=digest))
    manifest = msgspec.structs.replace(manifest, tensors=specs)
    check_version(manifest)
    return WeightVersion(manifest, payload, _views(manifest, payload))


def without_digests(manifest: Manifest) -> Manifest:
    """Returns `manifest` without its tensors' digests: a delta need not carry them, since its result has
    them."""
    specs = [msgspec.structs.replace(s, digest="") for s in manifest.tensors]
    return msgspec.structs.replace(manifest, tensors=specs)


class Verifier:
    """Hashes a payload while it arrives from the front, while its bytes are still in the CPU's cache.

    Raises WeightVersionError when made for a manifest that contradicts itself or a payload of
    another size, and as soon as a tensor does not hash to its digest.
    """

    def __init__(self, manifest: Manifest, payload: torch.Tensor) -> None:
        check_version(manifest)
        if payload.dtype != torch.uint8 or payload.numel() != manifest.nbytes:
            raise WeightVersionError(
                f"version {manifest.version}: {payload.numel()} of {manifest.nbytes} bytes"
            )
        self._manifest, self._payload = manifest, payload
        self._raw = payload.numpy().data
        self._tensors = iter(manifest.tensors)
        self._next()

    def advance(self, nbytes: int) -> None:
        """Hashes on, now that the first `nbytes` bytes are there."""
        while (spec := self._spec) is not None:
            end = spec.offset + spec.nbytes
            if self._at < (upto := min(end, nbytes)):
                self._hash.update(self._raw[self._at : upto])
                self._at = upto
            if self._at < end:
                return
            if self._hash.hexdigest() != spec.digest:
                raise WeightVersionError(
                    f"version {self._manifest.version}: {spec.name} does not hash to {spec.digest}"
                )
            self._next()

    def finish(self) -> WeightVersion:
        """Returns the version; all bytes must have been seen."""
        assert self._spec is None
        return WeightVersion(self._manifest, self._payload, _views(self._manifest, self._payload))

    def _next(self) -> None:
        self._spec = next(self._tensors, None)
        self._at = self._spec.offset if self._spec else 0
        self._hash = xxhash.xxh3_128()


def check_version(manifest: Manifest) -> None:
    """Raises WeightVersionError unless the manifest agrees with itself.

    Tensors have distinct names, known dtypes, as many bytes as their shape needs, and fill the payload one
    after the other, as closely as `pack_version` lays them; all of them together, the version's number and what
    says how to compute with them hash to the manifest's digest. Receivers ask this before they allocate a
    payload.
    """
    where = f"version {manifest.version}"
    try:
        digest = digest_of(manifest)
    except (TypeError, ValueError, RecursionError) as error:
        raise WeightVersionError(f"{where}: its manifest is no JSON: {error}") from error
    if digest != manifest.digest:
        raise WeightVersionError(f"{where}: the manifest does not hash to {manifest.digest}")
    if len({spec.name for spec in manifest.tensors}) != len(manifest.tensors):
        raise WeightVersionError(f"{where}: a tensor is named twice")
    end = 0
    for spec in manifest.tensors:
        dtype = DTYPES.get(spec.dtype)
        if dtype is None:
            raise WeightVersionError(f"{where}: {spec.name} has unknown dtype {spec.dtype!r}")
        # torch views no shape whose sizes, other than 0, have a product over 64 bits.
        viewed = min(spec.shape, default=0) >= 0 and math.prod(n or 1 for n in spec.shape) < 1 << 48
        if not viewed or math.prod(spec.shape) * dtype.itemsize != spec.nbytes:
            raise WeightVersionError(
                f"{where}: {spec.name}, {spec.dtype}{list(spec.shape)}, has {spec.nbytes} bytes"
            )
        if spec.offset != _aligned(end):
            raise WeightVersionError(f"{where}: {spec.name} is misplaced at {spec.offset}")
        end = spec.offset + spec.nbytes
    if end != manifest.nbytes:
        raise WeightVersionError(f"{where}: tensors end at {end} of {manifest.nbytes} bytes")


def _aligned(end: int) -> int:
    """Returns where the tensor after one that ends at `end` begins."""
    return -(-end // ALIGNMENT) * ALIGNMENT


def digest_of(manifest: Manifest) -> str:
    """Returns xxh3-128 over every tensor's name, dtype, shape and digest and, as JSON, over the version's
    number and all that says how an engine computes with them: format, uaq_scale, model, noise and extra. It is
    hexadecimal."""
    m = manifest
    facts = (m.version, m.format, m.uaq_scale, m.model, m.noise, m.extra)
    h = xxhash.xxh3_128(
        msgspec.json.encode(_with_texts_as_keys(msgspec.to_builtins(facts)), order="sorted")
    )
    for s in m.tensors:
        h.update(f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}\0{s.digest}\n".encode())
    return h.hexdigest()


def _with_texts_as_keys(value: Any) -> Any:
    """Returns `value` with the keys of its tables as JSON has them: a config.json's id2label has numbers."""
    if isinstance(value, dict):
        return {str(key): _with_texts_as_keys(item) for key, item in value.items()}
    return [*map(_with_texts_as_keys, value)] if isinstance(value, list | tuple) else value


def _views(manifest: Manifest, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        s.name: payload[s.offset : s.offset + s.nbytes].view(DTYPES[s.dtype]).reshape(s.shape)
        for s in manifest.tensors
    }
