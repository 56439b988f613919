"""Weights on their way out of the learner: a version is built and handed over."""
