"""Records to bytes and back, in msgpack."""

import secrets
from typing import Any, Generic, TypeVar

import msgspec
from msgspec.structs import replace

from areal_q.decode_errors import in_words
from areal_q.errors import RecordError
from areal_q.messages.tokens import Array
from areal_q.messages.trajectories import Group, PartialGroup, Ticket, WorkerStatus
from areal_q.messages.weight_sync import Broadcast, FetchReply, FetchRequest, Manifest

T = TypeVar("T")

MAX_RECORD_BYTES = 256 << 20
"""The largest record a decoder looks at: 64 responses of 128k tokens stay well below."""
MAX_STATUS_BYTES = 16 << 10
"""The largest heartbeat"""

LONG_BYTES = 8192
"""Bytes from which to take an array out of a record costs less than to copy it"""

_encoder = msgspec.msgpack.Encoder()
_PLACEHOLDER = secrets.token_bytes(16)
"""Stands for an array in a record; nobody outside knows it, so that no record holds it otherwise."""
_ENCODED_PLACEHOLDER = _encoder.encode(_PLACEHOLDER)


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def encode_group(group: Group) -> list[bytes | memoryview]:
    """Returns the bytes of `encode` in parts, of which the long arrays are the group's own memory. Where many
    groups are sent at once, fresh memory for copies takes half of the worker's time for a large one."""
    arrays: list[bytes | memoryview] = []

    def taken_out(array: Array) -> Array:
        if len(array.data) < LONG_BYTES:
            return array
        arrays.append(array.data)
        return Array(array.dtype, array.shape, _PLACEHOLDER)

    if not any(
        t.routes or t.sampling_mask or len(t.response_ids.data) >= LONG_BYTES
        for t in group.trajectories
    ):
        return [encode(group)]
    trajectories = [
        replace(
            t,
            response_ids=taken_out(t.response_ids),
            behavior_logprobs=taken_out(t.behavior_logprobs),
            loss_mask=taken_out(t.loss_mask),
            routes=t.routes and taken_out(t.routes),
            sampling_mask=t.sampling_mask and taken_out(t.sampling_mask),
        )
        for t in group.trajectories
    ]
    first, *rest = encode(replace(group, trajectories=trajectories)).split(_ENCODED_PLACEHOLDER)
    parts: list[bytes | memoryview] = [first]
    for array, following in zip(arrays, rest, strict=True):
        parts += [_header(len(array)), array, following]
    return parts


def _header(nbytes: int) -> bytes:
    """Returns what msgpack puts before at least 256 bytes."""
    if nbytes < 1 << 16:
        return b"\xc5" + nbytes.to_bytes(2, "big")
    return b"\xc6" + nbytes.to_bytes(4, "big")


def check_size(nbytes: int, limit: int | None = None) -> None:
    """Raises RecordError for a record that no decoder would look at: one over `limit`, or MAX_RECORD_BYTES."""
    limit = limit or MAX_RECORD_BYTES
    if nbytes > limit:
        raise RecordError(f"record of {nbytes} bytes is over the limit of {limit}")


class MessageDecoder(Generic[T]):
    """Strict decoding of one type (or union) with a size limit; anything else is a RecordError."""

    def __init__(self, kind: Any, limit: int | None = None) -> None:
        self._decoder, self._limit = msgspec.msgpack.Decoder(kind), limit

    def __call__(self, data: bytes | memoryview) -> T:
        check_size(len(data), self._limit)
        try:
            # From a view, the arrays' views take no further object each.
            return self._decoder.decode(memoryview(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"record refused: {in_words(error)}") from error


decode_ticket: MessageDecoder[Ticket] = MessageDecoder(Ticket)
decode_partial: MessageDecoder[PartialGroup] = MessageDecoder(PartialGroup)
decode_group: MessageDecoder[Group] = MessageDecoder(Group)
decode_broadcast: MessageDecoder[Broadcast] = MessageDecoder(Broadcast)
decode_manifest: MessageDecoder[Manifest] = MessageDecoder(Manifest)
decode_request: MessageDecoder[FetchRequest] = MessageDecoder(FetchRequest)
decode_reply: MessageDecoder[FetchReply] = MessageDecoder(FetchReply)
decode_status: MessageDecoder[WorkerStatus] = MessageDecoder(WorkerStatus, MAX_STATUS_BYTES)
