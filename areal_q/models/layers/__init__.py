"""The decoder's layers."""
