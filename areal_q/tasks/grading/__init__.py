"""Rewards and the graders that they use, inside the worker or in a process that can be killed."""
