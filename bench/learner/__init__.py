"""A learner's step and its parts beside their peers."""
