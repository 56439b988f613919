"""The Redis replay buffer and the trajectory log."""
