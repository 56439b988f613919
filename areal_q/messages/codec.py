"""Records to bytes and back, in msgpack."""

from typing import Any, Generic, TypeVar

import msgspec

from areal_q.errors import RecordError
from areal_q.messages.trajectories import Group, PartialGroup, Ticket, WorkerStatus
from areal_q.messages.weight_sync import Broadcast, FetchReply, FetchRequest, Manifest

T = TypeVar("T")

MAX_RECORD_BYTES = 256 << 20
"""The largest record a decoder looks at: 64 responses of 128k tokens stay well below."""

_encoder = msgspec.msgpack.Encoder()


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


def encode_into(message: msgspec.Struct, buffer: bytearray) -> None:
    """`encode`, into memory that was used before: fresh pages cost more than the encoding of a large record."""
    _encoder.encode_into(message, buffer)


def check_size(nbytes: int) -> None:
    """Raises RecordError for a record that no decoder would look at."""
    if nbytes > MAX_RECORD_BYTES:
        raise RecordError(f"record of {nbytes} bytes is over the limit of {MAX_RECORD_BYTES}")


class MessageDecoder(Generic[T]):
    """Strict decoding of one type (or union) with a size limit; anything else is a RecordError."""

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def __call__(self, data: bytes | memoryview) -> T:
        check_size(len(data))
        try:
            # From a view, the arrays' views take no further object each.
            return self._decoder.decode(memoryview(data))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise RecordError(f"record refused: {error}") from error


decode_ticket: MessageDecoder[Ticket] = MessageDecoder(Ticket)
decode_partial: MessageDecoder[PartialGroup] = MessageDecoder(PartialGroup)
decode_group: MessageDecoder[Group] = MessageDecoder(Group)
decode_broadcast: MessageDecoder[Broadcast] = MessageDecoder(Broadcast)
decode_manifest: MessageDecoder[Manifest] = MessageDecoder(Manifest)
decode_request: MessageDecoder[FetchRequest] = MessageDecoder(FetchRequest)
decode_reply: MessageDecoder[FetchReply] = MessageDecoder(FetchReply)
decode_status: MessageDecoder[WorkerStatus] = MessageDecoder(WorkerStatus)
