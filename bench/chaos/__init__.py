"""A cluster under random faults, and whether every promise was kept."""
