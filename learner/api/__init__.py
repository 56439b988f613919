"""What `areal_q.Learner` runs."""
