"""Checks that run before anything is started: this machine, and the settings."""
