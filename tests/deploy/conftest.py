"""Tests of what is deployed end with a table of what they saw on a real engine."""

from helpers.seen_table import pytest_terminal_summary  # noqa: F401  a hook of pytest
