"""Measurements beside training: engine fidelity, rescoring, token records."""
