"""What a server counts."""

from dataclasses import dataclass


@dataclass
class ServerStats:
    """Counts since the start; written by the server's thread only."""

    published: int = 0
    """Versions announced"""
    skipped: int = 0
    """Versions replaced by a newer one before their turn came"""
    last_version_bytes: int = 0
    """What the newest version costs a worker that follows: its delta, or else its payload"""
    deltas: int = 0
    delta_bytes: int = 0
    stalls: int = 0
    """Deltas that took longer than `stall_s`; their versions were announced without"""
    subscribers: int = 0
    """Workers and relays that listen now"""
    fetches: int = 0
    """Manifests served"""
    catch_ups: int = 0
    """Deltas served on request, to workers that were some versions behind"""
    chunks: int = 0
    chunk_bytes: int = 0
    gone: int = 0
    """Requests for something that is no longer held"""
    refused: int = 0
    """Frames that were no request"""
    strangers: int = 0
    """Connections refused because their key is not listed"""


@dataclass
class FetchStats:
    """Counts since the start; written by the subscriber's thread only."""

    fetches: int = 0
    """Payloads fetched in full"""
    fetched_bytes: int = 0
    catch_ups: int = 0
    """Deltas to a version several behind, fetched instead of a payload"""
    catch_up_bytes: int = 0
    retries: int = 0
    """Answers that were overdue, each met by a new connection and a repeated question"""
    gone: int = 0
    """Fetches that began again because the learner no longer held the version"""
    mismatches: int = 0
    """Versions refused because a hash differed or the manifest contradicts itself"""
    refused: int = 0
    """Frames that were no awaited answer"""


@dataclass
class SubscriberStats:
    """Counts since the start; written by the subscriber's thread only."""

    fetch: FetchStats
    received: int = 0
    """Versions verified and handed over"""
    skipped: int = 0
    """Version numbers of the same epoch that were never received"""
    epochs: int = 0
    """Learners followed: 1, and one more for every restart seen"""
    deltas: int = 0
    """Versions received as a delta, those of a catch-up included"""
    delta_bytes: int = 0
    mismatches: int = 0
    """Deltas refused because they were malformed or gave other bytes than the learner's"""
    silences: int = 0
    """Times the learner announced nothing for `silence_s`"""
    stalls: int = 0
    """Times a newer version was known and none arrived for `stall_s`"""
    refused: int = 0
    """Messages on the announcement socket that were neither announcement nor delta of this run"""
