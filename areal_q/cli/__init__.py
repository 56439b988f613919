"""The `areal-q` command and its own subcommands."""
