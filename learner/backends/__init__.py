"""Backends that compute a policy's log-probs, gradients and updates."""
