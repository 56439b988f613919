"""`areal-q eval`: generates a model's answers to problems and scores them."""
