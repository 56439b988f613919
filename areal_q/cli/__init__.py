"""The `areal-q` command: the commands, the launcher of local processes, and what they show."""
