"""Between learner and workers: the replay buffer in Redis, weights on the wire, the logs, and their report."""
