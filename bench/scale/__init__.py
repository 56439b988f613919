"""How far one Redis and one learner carry: measured costs and a simulation."""
