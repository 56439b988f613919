"""Counters of both ends of the weight sync. Each counts since the start, and only its own thread writes it."""

from dataclasses import dataclass


@dataclass
class ServerStats:
    """Counters of a weight server."""

    published: int = 0
    """Number of versions announced."""
    skipped: int = 0
    """Number of versions that a newer one replaced before their turn came."""
    deltas: int = 0
    """Number of deltas sent to all."""
    delta_bytes: int = 0
    """Bytes of the deltas sent to all, counted once each."""
    stalls: int = 0
    """Number of deltas that took longer than `stall_s`; their versions were announced without."""
    subscribers: int = 0
    """Number of workers and relays that listen now."""
    fetches: int = 0
    """Number of manifests served."""
    catch_ups: int = 0
    """Number of answers with deltas to workers that were some versions behind."""
    chunks: int = 0
    """Number of chunks sent, of versions and of deltas."""
    chunk_bytes: int = 0
    """Bytes of the chunks sent."""
    gone: int = 0
    """Number of requests for something that is no longer held."""
    refused: int = 0
    """Number of messages that were no valid request."""
    strangers: int = 0
    """Number of connections refused because their key is not listed."""


@dataclass
class FetchStats:
    """Counters of a weight subscriber's fetcher."""

    fetches: int = 0
    """Number of payloads fetched in full."""
    fetched_bytes: int = 0
    """Bytes of the payloads fetched in full."""
    catch_ups: int = 0
    """Number of times that deltas were fetched in place of a payload."""
    catch_up_bytes: int = 0
    """Bytes of the deltas fetched."""
    retries: int = 0
    """Number of overdue answers, each met by a new connection and a repeated question."""
    gone: int = 0
    """Number of fetches that began again because the server no longer held the version."""
    mismatches: int = 0
    """Number of versions refused because a hash differed or the manifest contradicts itself."""
    refused: int = 0
    """Number of messages that were no awaited answer."""


@dataclass
class SubscriberStats:
    """Counters of a weight subscriber."""

    fetch: FetchStats
    """The fetcher's part of the counters."""
    received: int = 0
    """Number of versions verified and handed over."""
    skipped: int = 0
    """Number of versions of the same epoch that were never received."""
    epochs: int = 0
    """Number of learners followed: 1, and one more for every restart seen."""
    deltas: int = 0
    """Number of versions made from a delta, those of a catch-up included."""
    delta_bytes: int = 0
    """Bytes of the deltas that were applied."""
    mismatches: int = 0
    """Number of deltas refused because they were malformed or gave other bytes than the learner's."""
    silences: int = 0
    """Number of times that the server announced nothing for `silence_s`."""
    stalls: int = 0
    """Number of times that a newer version was known and none arrived for `stall_s`."""
    refused: int = 0
    """Number of announcements, deltas and manifests that were malformed or of another run."""

    @property
    def all_refused(self) -> int:
        """Number of messages and versions refused, for whatever reason."""
        fetch = self.fetch
        return self.refused + self.mismatches + fetch.refused + fetch.mismatches
