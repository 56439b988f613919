"""Tasks and rewards."""
