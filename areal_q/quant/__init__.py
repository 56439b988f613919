"""Number formats: one definition for the engine, the learner and the wire."""
