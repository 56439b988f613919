"""Commands that look into a run's state in Redis, and change it."""
