"""`areal-q doctor`: where rollouts and learner disagree, and why."""
