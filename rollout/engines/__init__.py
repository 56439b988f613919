"""Engines behind one Protocol."""
