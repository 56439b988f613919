"""The loops of the learner's pass over a batch in bfloat16 on a CPU."""
