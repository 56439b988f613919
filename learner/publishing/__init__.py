"""The learner's side of weight sync: building a version and handing it to the weight server."""
