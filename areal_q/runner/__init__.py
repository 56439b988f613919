"""A run on this machine: its processes, started, watched and ended together, and what is shown of it."""
