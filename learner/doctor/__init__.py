"""`areal-q doctor`: why a run does not learn, and where rollouts and learner disagree."""
