"""The publishing end of the weight protocol, in the learner and in relays."""
