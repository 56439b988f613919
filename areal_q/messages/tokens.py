"""What every record of tokens is made of: arrays, version spans, and the check of a response's own tokens.

Notation: T response tokens.
"""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args

import msgspec
import numpy as np

from areal_q.config.run import LARGEST_MASK
from areal_q.errors import RecordError

LARGEST_LOGPROB = 1e-3
"""Rounding may carry the log of a probability of 1 slightly above 0."""

FinishReason = Literal["stop", "length", "timeout"]
"""A stop was drawn; the budget of tokens was spent; `rollout.request_timeout_s` had passed."""
Dtype = Literal["uint8", "int8", "uint16", "int32", "int64", "float16", "float32"]
if TYPE_CHECKING:
    Bytes = bytes | memoryview
else:
    Bytes = memoryview  # msgspec decodes into one type of bytes, and takes either when it encodes
_LITTLE_ENDIAN = {name: np.dtype(name).newbyteorder("<") for name in get_args(Dtype)}


class Array(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """An n-dimensional array as raw little-endian bytes.

    Example: Array.of(np.int32([7, 9])) == Array("int32", (2,), b"\\x07\\0\\0\\0\\x09\\0\\0\\0")
    """

    dtype: Dtype
    shape: tuple[int, ...]
    data: Bytes
    """Decoded arrays are views of the record, so that no array is copied."""

    @classmethod
    def of(cls, values: Any, dtype: Dtype | None = None) -> "Array":
        array = np.ascontiguousarray(values, dtype=dtype)
        name: Any = array.dtype.name
        little_endian = array.astype(array.dtype.newbyteorder("<"), copy=False)
        return cls(name, array.shape, little_endian.tobytes())

    def numpy(self) -> np.ndarray:
        """Returns a read-only view. Raises RecordError when the bytes do not fill the shape."""
        dtype, shape = _LITTLE_ENDIAN[self.dtype], self.shape
        if min(shape, default=0) < 0 or len(self.data) != math.prod(shape) * dtype.itemsize:
            raise RecordError(
                f"array of {len(self.data)} bytes cannot be {self.dtype}{list(shape)}"
            )
        flat = np.frombuffer(self.data, dtype)
        return flat if len(shape) == 1 else flat.reshape(shape)

    @staticmethod
    def concatenate(arrays: Sequence["Array"]) -> np.ndarray:
        """Returns the numbers of `arrays`, which are of one dtype, one after the other, as a copy. One call for
        many arrays takes a tenth of a call of `numpy` for each. Raises RecordError as that does."""
        dtype = _LITTLE_ENDIAN[arrays[0].dtype]
        flat = np.frombuffer(bytearray().join([array.data for array in arrays]), dtype)
        if flat.size != sum([math.prod(array.shape) for array in arrays]):
            raise RecordError("the bytes of several arrays do not fill their shapes")
        return flat


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """`tokens` consecutive response tokens drawn with weights `version`, whose manifest hashes to `digest`."""

    version: int
    tokens: int
    digest: str


def merge_spans(spans: Iterable[VersionSpan]) -> list[VersionSpan]:
    """Returns `spans`, neighbours of one version as one: [(v1, 2), (v1, 3), (v2, 1)] → [(v1, 5), (v2, 1)]."""
    out: list[VersionSpan] = []
    for span in spans:
        if out and (out[-1].version, out[-1].digest) == (span.version, span.digest):
            out[-1] = msgspec.structs.replace(span, tokens=out[-1].tokens + span.tokens)
        elif span.tokens:
            out.append(span)
    return out


LARGEST_REWARD = 1e15
"""In magnitude: the variance of a group is a float32."""


class TurnReward(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The reward of one turn, beside the episode's own."""

    token: Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
    """Place of the turn's last token among the own tokens of its path"""
    reward: float


class Drawn(Protocol):
    """Tokens, which of them were drawn, and what from."""

    @property
    def response_ids(self) -> Array: ...
    @property
    def loss_mask(self) -> Array: ...
    @property
    def sampling_mask(self) -> Array | None: ...


class Tokens(Drawn, Protocol):
    """Tokens with all that was recorded of each: a trajectory's own, or a branch's."""

    @property
    def behavior_logprobs(self) -> Array: ...
    @property
    def spans(self) -> list[VersionSpan]: ...
    @property
    def turn_rewards(self) -> tuple[TurnReward, ...]: ...


NOTHING = np.empty(0, np.int32)
"""What is told of a token that was not drawn, or could have been any"""


def common(a: list[int], b: list[int]) -> int:
    """Returns the length of the longest common beginning of tokens."""
    length = min(len(a), len(b))
    if a[:length] == b[:length]:  # mostly, and much faster
        return length
    return next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)


def mask_array(rows: Sequence[np.ndarray]) -> Array | None:
    """Returns the ids that each token was drawn from, int32 [T, K], filled with -1; None if there are none."""
    if all(row is NOTHING for row in rows):
        return None
    return padded(np.array([len(row) for row in rows]), np.concatenate(rows))


def padded(lengths: np.ndarray, ids: np.ndarray) -> Array:
    """Returns the same from the number of ids of each token and all ids, one after the other."""
    out = np.full((len(lengths), lengths.max()), -1, np.int32)
    out[np.arange(out.shape[1]) < lengths[:, None]] = ids
    return Array.of(out)


def unpadded(array: Array) -> tuple[np.ndarray, np.ndarray]:
    """Returns what `padded` was given."""
    there = array.numpy() >= 0
    return there.sum(1), array.numpy()[there]


def mask_rows(array: Array | None, tokens: int) -> list[np.ndarray]:
    """Returns what `mask_array` was given for so many `tokens`."""
    if array is None:
        return [NOTHING] * tokens
    lengths, ids = unpadded(array)
    return [row if len(row) else NOTHING for row in np.split(ids, lengths.cumsum()[:-1])]


_COLUMNS = (("response_ids", "int32"), ("behavior_logprobs", "float32"), ("loss_mask", "uint8"))


def _column(array: Array, name: str, dtype: str, t: Tokens, where: str) -> np.ndarray:
    if array.dtype == dtype and len(array.shape) == len(t.response_ids.shape) == 1:
        values = array.numpy()
        if values.size == t.response_ids.shape[0]:
            return values
    shape = list(t.response_ids.shape)
    raise RecordError(f"{where}: {name} is not {dtype} {shape}, one for each response token")


def validate_tokens(t: Tokens, where: str) -> None:
    """Raises RecordError, which begins with `where`, for tokens that break their contract."""
    ids, logprobs, _ = (
        _column(getattr(t, name), name, dtype, t, where) for name, dtype in _COLUMNS
    )
    if not ids.size:
        raise RecordError(f"{where}: empty response")
    # A NaN fails either comparison.
    if not (logprobs.min() > -np.inf and logprobs.max() <= LARGEST_LOGPROB):
        bad = np.flatnonzero(~(np.isfinite(logprobs) & (logprobs <= LARGEST_LOGPROB)))[0]
        raise RecordError(f"{where}, token {bad}: behaviour log-prob is {logprobs[bad]}")
    if ids.min() < 0:
        raise RecordError(f"{where}: negative token id")
    if any(s.tokens < 1 for s in t.spans) or sum(s.tokens for s in t.spans) != ids.size:
        raise RecordError(
            f"{where}: version spans cover {sum(s.tokens for s in t.spans)} of {ids.size} tokens"
        )


def validate_sampling_mask(t: Drawn, wanted: bool, where: str) -> None:
    """Raises RecordError, which begins with `where`, unless it is told what drawn tokens were drawn from where
    that is `wanted`, and nowhere else: different ids in order, with that of the token among them."""
    drawn, size = t.loss_mask.numpy() != 0, t.response_ids.shape[0]
    if t.sampling_mask is None:
        if wanted and drawn.any():
            raise RecordError(f"{where}: it is not told what its tokens were drawn from")
        return
    shape = t.sampling_mask.shape
    fits = t.sampling_mask.dtype == "int32" and len(shape) == 2 and shape[0] == size
    if not (wanted and fits and 0 < shape[1] <= LARGEST_MASK):
        raise RecordError(
            f"{where}: sampling_mask {t.sampling_mask.dtype}{list(shape)} is not int32 [{size}, 1 to "
            f"{LARGEST_MASK}] of a truncated distribution"
        )
    rows = t.sampling_mask.numpy()
    before, after = rows[:, :-1], rows[:, 1:]
    in_order = ((after == -1) | ((before >= 0) & (after > before))).all(1) & (rows[:, 0] >= -1)
    among = (rows == t.response_ids.numpy()[:, None]).any(1) | ~drawn
    if len(wrong := np.flatnonzero(~(in_order & among))):
        raise RecordError(
            f"{where}, token {wrong[0]}: sampling_mask has not different ids in order, its own among them"
        )


def validate_turn_rewards(t: Tokens, where: str) -> None:
    """Raises RecordError, which begins with `where`, unless the rewards of turns stand at drawn tokens, one
    after the other."""
    mask, before = t.loss_mask.numpy(), -1
    for token, reward in ((r.token, r.reward) for r in t.turn_rewards):
        if not (before < token < len(mask) and mask[token]):
            raise RecordError(
                f"{where}: a turn's reward at token {token}, which was not drawn or is out of order"
            )
        if not abs(reward) <= LARGEST_REWARD:
            raise RecordError(f"{where}, token {token}: reward is {reward}")
        before = token
