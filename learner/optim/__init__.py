"""Optimizers, and how their state is sharded."""
