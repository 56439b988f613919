"""Data of a learner step: admission of tickets, reading of groups, staleness, packing."""
