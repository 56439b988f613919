"""The built-in tasks and the files that problems are read from."""
