"""The trainer: its backends, optimizers, checkpoints and the weight broadcaster."""
