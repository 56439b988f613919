"""The learner's pool of groups that were read from Redis, and the samplers that draw batches from it."""
