"""Environments of the user's own: what their file says, without a process. Imports no torch."""
