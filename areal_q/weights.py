"""A published version of the weights: its manifest, its payload, and the hashes that tie them together.

The payload is the tensors' raw bytes, each at a 64-byte boundary, exactly as the engine will use them.
Pure: no socket here (see learner/broadcaster.py and rollout/receiver.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from areal_q.errors import WeightVersionError
from areal_q.messages import Manifest, TensorSpec

ALIGNMENT = 64


@dataclass(frozen=True)
class WeightVersion:
    """A complete, verified version. `tensors` are views into one payload buffer: do not write to them."""

    manifest: Manifest
    payload: torch.Tensor
    """uint8 [manifest.nbytes]"""
    tensors: Mapping[str, torch.Tensor]


def pack(
    tensors: Mapping[str, torch.Tensor],
    *,
    run: str,
    epoch: str,
    version: int,
    format: str,
    uaq_scale: float,
    model: dict[str, Any],
    published_s: float,
) -> WeightVersion:
    """Copies `tensors` into one payload and describes it. Names are kept in the order given."""
    layout: list[tuple[str, torch.Tensor, int, int]] = []
    end = 0
    for name, tensor in tensors.items():
        offset = -(-end // ALIGNMENT) * ALIGNMENT
        end = offset + tensor.nbytes
        layout.append((name, tensor, offset, tensor.nbytes))
    payload = torch.zeros(end, dtype=torch.uint8)
    specs = []
    for name, tensor, offset, nbytes in layout:
        raw = payload[offset : offset + nbytes]
        raw.copy_(_bytes(tensor))
        specs.append(
            TensorSpec(
                name=name,
                dtype=str(tensor.dtype).removeprefix("torch."),
                shape=tuple(tensor.shape),
                offset=offset,
                nbytes=nbytes,
                digest=xxhash.xxh3_128_hexdigest(raw.numpy()),
            )
        )
    manifest = Manifest(
        run=run,
        epoch=epoch,
        version=version,
        format=format,
        uaq_scale=uaq_scale,
        model=model,
        tensors=specs,
        nbytes=end,
        digest=digest_of(specs),
        published_s=published_s,
    )
    return WeightVersion(manifest, payload, _views(manifest, payload))


def unpack(manifest: Manifest, payload: torch.Tensor) -> WeightVersion:
    """The version that `manifest` describes, from received bytes. Raises WeightVersionError if a byte differs."""
    where = f"version {manifest.version}"
    if payload.dtype != torch.uint8 or payload.numel() != manifest.nbytes:
        raise WeightVersionError(f"{where}: {payload.numel()} of {manifest.nbytes} bytes")
    if digest_of(manifest.tensors) != manifest.digest:
        raise WeightVersionError(f"{where}: the manifest does not hash to {manifest.digest}")
    for spec in manifest.tensors:
        end = spec.offset + spec.nbytes
        if spec.offset < 0 or end > manifest.nbytes or spec.offset % ALIGNMENT:
            raise WeightVersionError(f"{where}: {spec.name} lies outside the payload")
        if xxhash.xxh3_128_hexdigest(payload[spec.offset : end].numpy()) != spec.digest:
            raise WeightVersionError(f"{where}: {spec.name} does not hash to {spec.digest}")
    return WeightVersion(manifest, payload, _views(manifest, payload))


def digest_of(specs: list[TensorSpec]) -> str:
    """xxh3-128 over every tensor's name, dtype, shape and digest."""
    h = xxhash.xxh3_128()
    for s in specs:
        h.update(f"{s.name}\0{s.dtype}\0{','.join(map(str, s.shape))}\0{s.digest}\n")
    return h.hexdigest()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().cpu().reshape(-1).view(torch.uint8)


def _views(manifest: Manifest, payload: torch.Tensor) -> dict[str, torch.Tensor]:
    views = {}
    for s in manifest.tensors:
        dtype = getattr(torch, s.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise WeightVersionError(
                f"version {manifest.version}: {s.name} has unknown dtype {s.dtype!r}"
            )
        try:
            views[s.name] = payload[s.offset : s.offset + s.nbytes].view(dtype).reshape(s.shape)
        except RuntimeError as error:
            raise WeightVersionError(f"version {manifest.version}: {s.name}: {error}") from error
    return views
