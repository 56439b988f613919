"""The `areal-q` command: its subcommands, the launcher of local processes, and the live view."""
