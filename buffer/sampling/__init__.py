"""Samplers, and the learner's pool of groups that they draw from."""
