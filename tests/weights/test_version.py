"""A version is what its manifest says, byte for byte, or it is refused."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q import messages
from areal_q.errors import WeightVersionError
from areal_q.messages import Manifest, Noise, TensorSpec
from areal_q.weights import version as weights
from areal_q.weights.version import ALIGNMENT, DTYPES, PayloadPool, WeightVersion

Make = Callable[..., WeightVersion]


def pack(tensors: dict[str, torch.Tensor]) -> WeightVersion:
    return weights.pack_version(
        tensors,
        run="run",
        epoch="a",
        version=3,
        format="int8",
        uaq_scale=1.5,
        model={"layers": 2},
        published_s=0.0,
    )


def test_a_manifest_keeps_the_fields_that_deltas_rely_on() -> None:
    """A base's encoded manifest is its delta's dictionary: a program with other fields could not read it."""
    fields = (
        "schema run run_id epoch version format uaq_scale model tensors nbytes digest published_s"
    )
    assert Manifest.__struct_fields__ == (*fields.split(), "noise", "extra")
    made = msgspec.structs.replace(pack({}).manifest, run_id="id")
    assert messages.decode_manifest(messages.encode(made)).run_id == "id"
    assert pack({}).manifest.run_id == ""


def raw(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


@settings(deadline=None)
@given(
    parts=st.lists(
        st.tuples(st.sampled_from(sorted(DTYPES)), st.lists(st.integers(0, 5), max_size=3)),
        max_size=6,
    ),
    seed=st.integers(0, 2**32 - 1),
)
def test_what_is_packed_is_unpacked_bit_for_bit(
    parts: list[tuple[str, list[int]]], seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, (dtype, shape) in enumerate(parts):
        empty = torch.empty(shape, dtype=DTYPES[dtype])
        noise = torch.randint(0, 256, (empty.nbytes,), generator=generator, dtype=torch.uint8)
        noise = noise % 2 if dtype == "bool" else noise
        tensors[f"t{i}"] = noise.view(DTYPES[dtype]).reshape(shape)
    packed = pack(tensors)
    manifest = messages.decode_manifest(messages.encode(packed.manifest))
    version = weights.unpack_version(manifest, packed.payload.clone())
    assert list(version.tensors) == list(tensors)
    for name, tensor in tensors.items():
        got = version.tensors[name]
        assert (got.dtype, got.shape, raw(got)) == (tensor.dtype, tensor.shape, raw(tensor))
    assert all(spec.offset % ALIGNMENT == 0 for spec in manifest.tensors)


def test_a_transposed_or_sliced_tensor_is_packed_as_it_reads() -> None:
    base = torch.arange(24, dtype=torch.int32).reshape(4, 6)
    packed = pack({"transposed": base.T, "sliced": base[1:, ::2]})
    assert torch.equal(packed.tensors["transposed"], base.T)
    assert torch.equal(packed.tensors["sliced"], base[1:, ::2])


def test_packing_copies() -> None:
    tensor = torch.zeros(8)
    packed = pack({"t": tensor})
    tensor.fill_(1)
    assert packed.tensors["t"].sum() == 0


def test_a_reused_payload_is_as_good_as_a_new_one() -> None:
    pool = PayloadPool()
    pool.lend(64 + 12).fill_(0xAA)
    tensors = {"a": torch.arange(7, dtype=torch.int8), "b": torch.rand(3)}
    fields: dict[str, Any] = {"run": "run", "epoch": "a", "version": 3, "format": "int8"}
    fields |= {"uaq_scale": 1.5, "model": {"layers": 2}, "published_s": 0.0}
    again = weights.pack_version(tensors, **fields, pool=pool)
    assert pool.made == 1
    assert torch.equal(again.payload, pack(tensors).payload)
    assert again.manifest == pack(tensors).manifest


def test_every_altered_byte_of_a_tensor_is_refused() -> None:
    packed = pack({"a": torch.arange(7, dtype=torch.int8), "b": torch.rand(3)})
    for spec in packed.manifest.tensors:
        for at in range(spec.offset, spec.offset + spec.nbytes):
            payload = packed.payload.clone()
            payload[at] ^= 1
            with pytest.raises(WeightVersionError, match=f"{spec.name} does not hash"):
                weights.unpack_version(packed.manifest, payload)


def test_a_payload_of_another_size_is_refused() -> None:
    packed = pack({"a": torch.arange(7, dtype=torch.int8)})
    for size in (0, 6, 8):
        with pytest.raises(WeightVersionError, match=f"{size} of 7 bytes"):
            weights.unpack_version(packed.manifest, torch.zeros(size, dtype=torch.uint8))


def test_a_dtype_that_cannot_travel_is_refused_when_packed() -> None:
    with pytest.raises(WeightVersionError, match="complex64"):
        pack({"t": torch.zeros(2, dtype=torch.complex64)})


def consistent(manifest: Manifest, tensors: list[TensorSpec], **changed: Any) -> Manifest:
    """As a liar would make it: altered tensors under a digest that fits."""
    lie = msgspec.structs.replace(manifest, tensors=tensors, **changed)
    return msgspec.structs.replace(lie, digest=weights.digest_of(lie))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset": -64}, "misplaced at -64"),
        ({"offset": 32}, "misplaced at 32"),
        ({"offset": 0}, "misplaced at 0"),
        ({"offset": 1 << 40}, "misplaced at 1099511627776"),
        ({"offset": 128}, "misplaced at 128"),
        ({"nbytes": 1 << 40}, "has 1099511627776 bytes"),
        ({"nbytes": -4}, "has -4 bytes"),
        ({"shape": (-2, -2)}, "has 16 bytes"),
        ({"shape": (1 << 40, 1 << 40)}, "has 16 bytes"),
        ({"shape": (1 << 40, 1 << 40, 0), "nbytes": 0}, "has 0 bytes"),
        ({"dtype": "complex64"}, "unknown dtype 'complex64'"),
        ({"dtype": "__doc__"}, "unknown dtype"),
        ({"dtype": "nn"}, "unknown dtype"),
        ({"name": "a"}, "named twice"),
    ],
)
def test_a_manifest_that_contradicts_itself_is_refused(
    change: dict[str, Any], message: str
) -> None:
    packed = pack({"a": torch.zeros(5), "b": torch.zeros(4)})
    first, second = packed.manifest.tensors
    lie = consistent(packed.manifest, [first, msgspec.structs.replace(second, **change)])
    with pytest.raises(WeightVersionError, match=message):
        weights.check_version(lie)


def test_a_manifest_whose_tensors_were_exchanged_does_not_hash() -> None:
    packed = pack({"a": torch.zeros(5), "b": torch.ones(4)})
    for field, value in (("digest", "0" * 32), ("tensors", packed.manifest.tensors[::-1])):
        with pytest.raises(WeightVersionError, match="manifest does not hash"):
            weights.check_version(msgspec.structs.replace(packed.manifest, **{field: value}))


@pytest.mark.parametrize(
    "lie",
    [
        {"version": 8},
        {"format": "int4"},
        {"uaq_scale": 1.0},
        {"model": {"layers": 3}},
        {"model": {"layers": 2.5}},
        {"noise": Noise(sigma=0.1, seed=1)},
        {"extra": {"lora_scale": 2.0}},
    ],
)
def test_number_and_computation_are_under_the_digest(lie: dict[str, Any]) -> None:
    packed = pack({"a": torch.arange(7, dtype=torch.int8)})
    lied = msgspec.structs.replace(packed.manifest, **lie)
    with pytest.raises(WeightVersionError, match="manifest does not hash"):
        weights.unpack_version(lied, packed.payload)
    sent = messages.decode_manifest(messages.encode(consistent(lied, lied.tensors)))
    assert sent.digest != packed.manifest.digest
    weights.check_version(sent)  # and travels as it is


def test_equal_digests_mean_equal_weights(make_version: Make) -> None:
    digests = {make_version(number).manifest.digest for number in range(5)}
    assert len(digests) == 5
    assert make_version(3, epoch="b").manifest.digest in digests
