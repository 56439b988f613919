"""The learner: loop and step, the policy with its backends, optimizers, checkpoints, replay and doctor."""
