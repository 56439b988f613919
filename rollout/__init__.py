"""The always-on rollout worker and its engines."""
