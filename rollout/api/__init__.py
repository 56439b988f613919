"""What `areal_q.Rollout` runs."""
