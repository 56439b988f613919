"""Trackers of other projects: each is fed from metrics.jsonl by a process of its own (docs/trackers.md)."""
