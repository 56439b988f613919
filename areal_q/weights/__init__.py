"""Published versions of the weights: manifest, payload and hashes, and the deltas between versions."""
