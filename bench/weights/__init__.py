"""Weights from learner to worker: speed, bytes and pauses."""
