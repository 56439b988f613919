"""The Parquet logs of a run: trajectories, steps and tokens."""
