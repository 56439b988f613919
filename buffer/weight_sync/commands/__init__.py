"""Commands of the weight sync: the relay, the view of published versions, and the keys."""
