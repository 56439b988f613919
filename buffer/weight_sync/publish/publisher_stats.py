"""What a broadcaster counts."""

from dataclasses import dataclass


@dataclass
class BroadcastStats:
    """Counts since the start; written by the broadcaster's thread only."""

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
