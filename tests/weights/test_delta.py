"""A delta applied to its base gives the new version bit for bit, or an error; never other bytes."""

import itertools
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from areal_q import messages
from areal_q.errors import WeightVersionError
from areal_q.kernels import delta_blocks
from areal_q.kernels.delta_blocks import CLASSES
from areal_q.messages import Noise
from areal_q.weights import byte_planes, delta, delta_codec, version
from areal_q.weights.delta_codec import Moves
from areal_q.weights.version import WeightVersion

FLOATS = [torch.float8_e5m2, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [torch.int8, torch.uint8, torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


def make_version(number: int, tensors: dict[str, torch.Tensor], **changed: Any) -> WeightVersion:
    fields: dict[str, Any] = {
        "run": "test",
        "epoch": "a",
        "format": "int8",
        "uaq_scale": 1.5,
        "model": {"layers": 2},
        "published_s": float(number),
    }
    return version.pack_version(tensors, version=number, **(fields | changed))


def random_bits(rng: np.random.Generator, size: int, dtype: torch.dtype) -> torch.Tensor:
    tensor = torch.empty(size, dtype=dtype)
    codes(tensor).view(np.uint8)[:] = rng.integers(0, 256, tensor.nbytes, np.uint8)
    return tensor


def codes(tensor: torch.Tensor) -> np.ndarray:
    """The tensor's memory as unsigned integers of its element size."""
    return tensor.view(torch.uint8).numpy().view(f"<u{tensor.itemsize}")


def change_some(
    rng: np.random.Generator, tensor: torch.Tensor, count: int, small: bool
) -> torch.Tensor:
    """`tensor` with `count` elements changed, by ±1 of their integer codes or to any bits."""
    changed = tensor.clone()
    raw = codes(changed)
    where = rng.permutation(raw.size)[:count]
    if small:
        raw[where] += rng.choice(np.array([1, -1]), count).astype(raw.dtype)
    else:
        raw[where] = codes(random_bits(rng, count, tensor.dtype))
    return changed


def applied(base: WeightVersion, body: bytes) -> WeightVersion:
    return delta.apply(base, body, torch.full_like(base.payload, 0xAA))


def assert_same(a: WeightVersion, b: WeightVersion) -> None:
    assert a.manifest == b.manifest
    assert torch.equal(a.payload, b.payload)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    sizes=st.lists(st.sampled_from([0, 1, 2, 63, 1000, 70_000]), min_size=1, max_size=4),
    dtypes=st.lists(st.sampled_from(DTYPES), min_size=4, max_size=4),
    density=st.sampled_from([0.0, 1e-5, 1e-3, 0.02, 0.3, 0.6, 1.0]),
    small=st.booleans(),
)
def test_a_delta_on_its_base_gives_the_new_version_bit_for_bit(
    seed: int, sizes: list[int], dtypes: list[torch.dtype], density: float, small: bool
) -> None:
    rng = np.random.default_rng(seed)
    old = {f"t{i}": random_bits(rng, n, dtypes[i]) for i, n in enumerate(sizes)}
    new = {k: change_some(rng, t, int(np.ceil(density * t.numel())), small) for k, t in old.items()}
    base, wanted = make_version(1, old), make_version(2, new)
    body = delta.diff(base, wanted)
    assert body is not None
    assert_same(applied(base, body), wanted)


def test_changed_tells_the_share_of_every_tensor() -> None:
    old = {"a": torch.zeros(100, dtype=torch.int8), "b": torch.zeros(7), "c": torch.ones(3)}
    new = {"a": old["a"].clone(), "b": torch.ones(7), "c": old["c"]}
    new["a"][[3, 60]] = 1
    base, wanted = make_version(1, old), make_version(2, new)
    body = delta.diff(base, wanted)
    assert body is not None
    assert delta.changed(wanted.manifest, body) == {"a": (2, 100), "b": (7, 7), "c": (0, 3)}


def test_what_is_not_tensors_travels_with_a_delta_too() -> None:
    tensors = {"a": torch.zeros(10, dtype=torch.int8)}
    base = make_version(1, tensors)
    wanted = make_version(
        2,
        {"a": torch.ones(10, dtype=torch.int8)},
        noise=Noise(sigma=0.01, seed=7),
        extra={"lora_alpha": 16, "kv_scales": [0.5, 2.0]},
    )
    body = delta.diff(base, wanted)
    assert body is not None
    assert_same(applied(base, body), wanted)


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 510, 65_535, 65_536, 255 * 256, 1_000_000])
def test_a_single_change_is_found_again_after_any_gap(gap: int) -> None:
    old = torch.zeros(1_000_001, dtype=torch.int8)
    new = old.clone()
    new[gap] = -1
    base, wanted = make_version(1, {"t": old}), make_version(2, {"t": new})
    body = delta.diff(base, wanted)
    assert body is not None and len(body) < 250
    assert_same(applied(base, body), wanted)


@pytest.mark.parametrize("share", [0.0003, 0.001, 0.01, 0.1, 0.5, 0.9])
def test_a_delta_comes_close_to_the_entropy_of_its_changes(share: float) -> None:
    rng = np.random.default_rng(0)
    n = 4_000_000
    old = random_bits(rng, n, torch.int8)
    new = change_some(rng, old, int(share * n), small=True)
    body = delta.diff(make_version(1, {"t": old}), make_version(2, {"t": new}))
    assert body is not None
    entropy = -share * np.log2(share) - (1 - share) * np.log2(1 - share) + share
    assert len(body) < 1.07 * n * entropy / 8 + 300


def test_random_changes_cost_hardly_more_than_the_tensor() -> None:
    rng = np.random.default_rng(0)
    old, new = ({"t": random_bits(rng, 100_000, torch.int8)} for _ in range(2))
    body = delta.diff(make_version(1, old), make_version(2, new))
    assert body is not None and len(body) < 1.02 * 100_000


def test_versions_of_another_layout_have_no_delta() -> None:
    base = make_version(1, {"t": torch.zeros(4)})
    assert delta.diff(base, make_version(2, {"t": torch.zeros(2, 2)})) is None
    assert delta.diff(base, make_version(2, {"u": torch.zeros(4)})) is None
    assert delta.diff(base, make_version(2, {"t": torch.zeros(4), "u": torch.zeros(1)})) is None


def make_pair() -> tuple[WeightVersion, WeightVersion, bytes]:
    rng = np.random.default_rng(1)
    old = {"a": random_bits(rng, 5000, torch.int8), "b": random_bits(rng, 40, torch.float32)}
    new = {k: change_some(rng, t, 20, True) for k, t in old.items()}
    base, wanted = make_version(1, old), make_version(2, new)
    body = delta.diff(base, wanted)
    assert body is not None
    return base, wanted, body


PAIR = make_pair()


def test_a_delta_is_refused_on_another_base() -> None:
    _, wanted, body = PAIR
    with pytest.raises(WeightVersionError):
        applied(wanted, body)


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_a_damaged_delta_is_refused_or_gives_the_very_same_bytes(data: st.DataObject) -> None:
    base, wanted, body = PAIR
    damaged = bytearray(body)
    kind = data.draw(st.sampled_from(["flip", "cut", "insert"]))
    at = data.draw(st.integers(0, len(body) - 1))
    if kind == "flip":
        damaged[at] ^= data.draw(st.integers(1, 255))
    elif kind == "cut":
        del damaged[at : at + data.draw(st.integers(1, len(body)))]
    else:
        damaged[at:at] = data.draw(st.binary(min_size=1, max_size=8))
    try:
        result = applied(base, bytes(damaged))
    except WeightVersionError:
        return
    assert result.manifest == wanted.manifest
    assert torch.equal(result.payload, wanted.payload)


@pytest.mark.parametrize("stream", ["manifest", "flags"])
def test_a_stream_that_unpacks_to_too_much_is_refused_unread(stream: str) -> None:
    base, _, body = PAIR
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(512 << 20))
    assert len(bomb) < 100_000
    swollen = delta._decode_body(body)
    if stream == "manifest":
        swollen = msgspec.structs.replace(swollen, manifest=bomb)
    else:
        streams = msgspec.structs.replace(swollen.streams, **{stream: bomb})
        swollen = msgspec.structs.replace(swollen, streams=streams)
    with pytest.raises(WeightVersionError, match="frame of 536870912 bytes"):
        applied(base, messages.encode(swollen))


@pytest.mark.parametrize("size", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("share", [0.01, 0.5, 1.0])
@pytest.mark.parametrize("dtype", FLOATS)
def test_kernels_find_what_numpy_finds(size: int, share: float, dtype: torch.dtype) -> None:
    rng, mantissa = np.random.default_rng(size), delta.MANTISSA[dtype]
    old = codes(random_bits(rng, size, dtype))
    now = np.where(rng.random(size) < share, old + old.dtype.type(1), old)
    where, classes = np.flatnonzero(old != now), (old >> old.dtype.type(mantissa)) & 15
    count = len(where)
    found, step, kinds = np.empty(size, np.int64), np.empty_like(old), np.empty(size, np.uint8)
    gaps, sizes = np.empty(size, np.int64), np.empty(CLASSES, np.int64)
    outputs = found, step, kinds, gaps, sizes
    assert delta_blocks.changed_floats(old, now, mantissa, *outputs) == count
    assert found[:count].tolist() == where.tolist()
    assert np.array_equal(step[:count], in_order(now)[where] - in_order(old)[where])
    assert kinds[:count].tolist() == classes[where].tolist()
    assert sizes.tolist() == np.bincount(classes.astype(int), minlength=CLASSES).tolist()
    for c in range(CLASSES):
        members = np.flatnonzero(classes == c)
        ranks = np.flatnonzero(np.isin(members, where))
        assert (
            gaps[:count][kinds[:count] == c].tolist() == (np.diff(ranks, prepend=-1) - 1).tolist()
        )
    order = np.argsort(kinds[:count], kind="stable")
    starts = np.searchsorted(kinds[:count][order], np.arange(CLASSES + 1))
    again, kinds_again = np.empty_like(where), np.empty(count, np.uint8)
    grouped = gaps[:count][order]
    assert delta_blocks.places(old, mantissa, grouped, starts, again, kinds_again) == count
    assert again.tolist() == where.tolist() and kinds_again.tolist() == kinds[:count].tolist()


def in_order(bits: np.ndarray) -> np.ndarray:
    """The bit patterns of floats as unsigned integers that rise with the value."""
    top = bits.dtype.type(1 << (8 * bits.itemsize - 1))
    return np.where(bits < top, bits + top, ~bits)


@pytest.mark.parametrize("largest", [0, 1, 255, 256, 2**63])
def test_planes_are_the_bytes_of_the_numbers(largest: int) -> None:
    numbers = np.array([largest, *range(min(300, largest + 1))], np.uint64)
    found = byte_planes.planes_of(numbers)
    size = max(1, -(-largest.bit_length() // 8))
    rows = [int(number).to_bytes(size, "little") for number in numbers]
    assert [byte_planes.decompress(plane, 1 << 20) for plane in found] == [
        bytes(column) for column in zip(*rows, strict=True)
    ]
    assert byte_planes.numbers_of(found, len(numbers)).tolist() == numbers.tolist()
    for wrong, count in ((found, len(numbers) + 1), ([], 1), (found, 0), (found * 9, len(numbers))):
        with pytest.raises(ValueError, match="plane"):
            byte_planes.numbers_of(wrong, count)


def test_a_delta_under_another_number_is_refused() -> None:
    """As a relay would renumber it: the manifest within is altered, its digest kept."""
    base, new = (make_version(n, {"t": torch.full((99,), n)}) for n in (1, 3))
    made = delta.diff(base, new)
    assert made is not None
    body = delta._decode_body(made)
    lie = msgspec.structs.replace(new.manifest, version=7)
    written = byte_planes.compress(
        messages.encode(version.without_digests(lie)), delta._dictionary(base.manifest)
    )
    with pytest.raises(WeightVersionError, match="version 7: the manifest does not hash"):
        applied(base, messages.encode(msgspec.structs.replace(body, manifest=written)))


def test_streams_are_those_that_other_workers_read() -> None:
    """Their content, uncompressed: zstd may change."""

    def numbers(count: int, seed: int) -> np.ndarray:
        mixed = (np.arange(count, dtype=np.uint64) + np.uint64(seed)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        return (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9) >> np.uint64(32)

    old, new = {}, {}
    for seed, (dtype, one_in) in enumerate(itertools.product(DTYPES, (2, 2000, 10, 1))):
        size = 5_003
        name, tensor = f"t{seed}", torch.zeros(size, dtype=dtype)
        codes(tensor)[:] = numbers(size, seed) * numbers(size, seed + 9)
        changes = numbers(size, seed + 50)
        moves = np.where(changes % np.uint64(one_in) == 0, changes % np.uint64(5) + np.uint64(1), 0)
        old[name], new[name] = tensor, tensor.clone()
        codes(new[name])[:] += moves.astype(codes(tensor).dtype)
    body = delta.diff(make_version(1, old), make_version(2, new))
    assert body is not None
    streams = delta._decode_body(body).streams

    def content_of(frames: list[bytes]) -> list[bytes]:
        return [byte_planes.decompress(frame, 1 << 30) for frame in frames]

    gaps, (flags,) = content_of(streams.gaps), content_of([streams.flags])
    steps = [content_of(step) for step in streams.steps]
    content = messages.encode(msgspec.structs.replace(streams, gaps=gaps, flags=flags, steps=steps))
    assert (len(content), xxhash.xxh3_128_hexdigest(content)) == (
        82636,
        "2190e29ff744c7d0b97fb374243c8c3b",
    )


def test_a_last_place_beyond_its_tensor_is_refused() -> None:
    """Each gap fits into the 1,000 elements, and so does the place before the last."""
    where, step = np.array([500, 1000]), np.array([1, 1], np.uint8)
    streams = delta_codec.encode([delta_codec.Moves(0, 1001, where, step)])
    with pytest.raises(ValueError, match="beyond the 1000 of tensor 0"):
        delta_codec.decode(streams, [(1000, 1)], lambda index: None)


def test_places_of_a_class_without_changes_are_none() -> None:
    elements, gaps = np.array([0, 1, 1, 1, 0, 2], np.uint8), np.array([0, 0])
    starts = np.array([0, 1, 1, *[2] * (CLASSES - 2)])
    found, kinds = np.full(len(elements), -1), np.full(len(elements), 9, np.uint8)
    assert delta_blocks.places(elements, 0, gaps, starts, found, kinds) == 2
    assert found.tolist() == [0, 5, -1, -1, -1, -1] and kinds.tolist() == [0, 2, 9, 9, 9, 9]


@pytest.mark.parametrize("gap", [2, 70])
def test_a_place_beyond_its_class_is_not_found(gap: int) -> None:
    elements = np.array([1, 1, *[0] * 70], np.uint8)
    starts = np.array([0, 0, *[1] * (CLASSES - 1)])
    found, kinds = np.empty(1, np.int64), np.empty(1, np.uint8)
    assert delta_blocks.places(elements, 0, np.array([gap]), starts, found, kinds) == 0


@pytest.mark.parametrize("counts", [9, [4, 4]])
def test_counts_that_do_not_fit_their_tensor_are_refused(counts: int | list[int]) -> None:
    one = delta_codec.encode([Moves(0, 8, np.array([3]), np.array([1], np.uint8))])
    wrong = msgspec.structs.replace(one, changes=[delta_codec.Change(0, counts)])
    with pytest.raises(ValueError, match="of 8 elements"):
        delta_codec.decode(wrong, [(8, 1)], lambda index: None)


def test_a_tensor_named_many_times_costs_no_memory() -> None:
    """A delta of 2 KB that named one tensor 300 times once took 9 GB before it was refused."""
    elements = 3_000_000
    few = delta_codec.encode([Moves(0, elements, np.array([3]), np.array([1], np.uint8))])
    many = [delta_codec.Change(0, elements // 3 - 1)] * 300
    wrong = msgspec.structs.replace(few, changes=many)
    tracemalloc.start()
    with pytest.raises(ValueError, match="in order, each once"):
        delta_codec.decode(wrong, [(elements, 1)], lambda index: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


def test_changes_beyond_the_gaps_cost_no_memory() -> None:
    elements, tensors = 3_000_000, 40
    few = delta_codec.encode([Moves(0, elements, np.array([3]), np.array([1], np.uint8))])
    many = [delta_codec.Change(index, elements // 3 - 1) for index in range(tensors)]
    wrong = msgspec.structs.replace(few, changes=many)
    tracemalloc.start()
    with pytest.raises(ValueError, match="plane of"):
        delta_codec.decode(wrong, [(elements, 1)] * tensors, lambda index: None)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20
