"""Offline repetition of logged learner steps, comparison with the record, and export of checkpoints."""
