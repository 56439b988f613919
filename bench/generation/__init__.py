"""Generation beside its peers."""
