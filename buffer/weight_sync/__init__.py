"""Serving versions of the weights over ZeroMQ: what the learner and `areal-q relay` have in common.

The other side, which follows and fetches, is buffer/weight_sync/subscriber.py.
"""
