"""Every record that crosses a process border, as msgspec Structs on msgpack. Imports no torch.

    learner ──Ticket──▶ Redis ──Ticket──▶ worker ──Group──▶ Redis ──Group──▶ learner
    learner ──Announce, Delta (PUB)──▶ worker ──Fetch… (DEALER)──▶ learner ──replies, chunks (ROUTER)──▶ worker

Records that outlive a process keep their field names, so that the schema can grow: a new field needs a
default, and nothing else changes. Arrays travel as raw little-endian bytes with a dtype, never as lists.
"""
# ruff: noqa: I001  (isort would give each of these names an import of its own)

from areal_q.messages.branches import (
    MOST_BRANCHES as MOST_BRANCHES,
    Branch as Branch,
)
from areal_q.messages.codec import (
    MAX_RECORD_BYTES as MAX_RECORD_BYTES,
    MessageDecoder as MessageDecoder,
    check_size as check_size,
    decode_broadcast as decode_broadcast,
    decode_group as decode_group,
    decode_manifest as decode_manifest,
    decode_partial as decode_partial,
    decode_reply as decode_reply,
    decode_request as decode_request,
    decode_status as decode_status,
    decode_ticket as decode_ticket,
    encode as encode,
    encode_group as encode_group,
)
from areal_q.messages.paths import (
    mean_of_turns as mean_of_turns,
    parts as parts,
    places as places,
    rewards_of_turns as rewards_of_turns,
    with_teacher as with_teacher,
)
from areal_q.messages.tokens import (
    Array as Array,
    Dtype as Dtype,
    FinishReason as FinishReason,
    TurnReward as TurnReward,
    VersionSpan as VersionSpan,
    merge_spans as merge_spans,
)
from areal_q.messages.trajectories import (
    LONGEST_NAME as LONGEST_NAME,
    MESSAGE_SCHEMA as MESSAGE_SCHEMA,
    FailureCause as FailureCause,
    Group as Group,
    PartialGroup as PartialGroup,
    PartialResponse as PartialResponse,
    Ticket as Ticket,
    Trajectory as Trajectory,
    WorkerStatus as WorkerStatus,
)
from areal_q.messages.weight_sync import (
    MAX_CREDIT as MAX_CREDIT,
    Announce as Announce,
    Broadcast as Broadcast,
    ChunkReply as ChunkReply,
    Delta as Delta,
    DeltasReply as DeltasReply,
    FetchChunk as FetchChunk,
    FetchDeltas as FetchDeltas,
    FetchHeld as FetchHeld,
    FetchManifest as FetchManifest,
    FetchReply as FetchReply,
    FetchRequest as FetchRequest,
    Gone as Gone,
    HeldReply as HeldReply,
    HeldVersion as HeldVersion,
    Manifest as Manifest,
    ManifestReply as ManifestReply,
    Noise as Noise,
    SharedFile as SharedFile,
    TensorSpec as TensorSpec,
)
