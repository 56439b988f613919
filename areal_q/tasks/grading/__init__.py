"""Rewards and the graders behind them, in the process or isolated in one that can be killed."""
