"""Environments: how a ticket becomes responses."""
