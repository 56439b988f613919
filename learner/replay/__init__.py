"""Logged learner steps again, offline: replay, comparison and export."""
