"""Writes demos.jsonl: conversations of which less than half ask, for a model that can do both."""

import json
import random

rng = random.Random(1)
with open("demos.jsonl", "w") as lines:
    for _ in range(1000):
        a, b = rng.randrange(10, 100), rng.randrange(10, 100)
        asked = [{"role": "user", "content": f"{a}+{b}"}]
        said = [{"role": "assistant", "content": str(a + b)}]
        if rng.random() < 0.4:
            asked += [
                {"role": "assistant", "content": "?"},
                {"role": "user", "content": str(a + b)},
            ]
        lines.write(json.dumps({"messages": asked + said, "tools": []}) + "\n")
