"""`areal-q eval`: answers of a model, and their scores."""
