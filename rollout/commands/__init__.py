"""Commands for operators: `areal-q check` and `areal-q status`."""
