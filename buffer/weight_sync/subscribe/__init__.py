"""The subscribing end of the weight protocol, in workers and in relays."""
