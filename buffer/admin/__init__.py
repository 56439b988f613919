"""What `areal-q buffer` does: shows a run's state in Redis and changes it."""
