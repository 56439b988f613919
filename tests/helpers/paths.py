"""Paths that tests start from."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
"""The repository's root."""
