"""Supervised learning with the learner's own step: demonstrations as samples, and the warm start of a run."""
