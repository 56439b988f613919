"""Speed at three shapes of a model, beside peers and beside what the machine can do."""
