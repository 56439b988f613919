"""Everything that needs a GPU, in one table."""
