import json
import random

rng = random.Random(0)
sums = rng.sample([(a, b) for a in range(10, 100) for b in range(10, 100)], 1000)
parameters = {"type": "object", "properties": {"a": {}, "b": {}}}
tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]


def demonstration(a: int, b: int) -> dict:
    """Some use the tool, most do not. They say how, and leave it to the reward what is better."""
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": a, "b": b}}}
    used = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a + b)},
    ]
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": f"{a}+{b}"}]
    said = [{"role": "assistant", "content": str(a + b)}]
    return {"messages": asked + used * (rng.random() < 0.45) + said, "tools": tools}


for file, rows in (
    ("demos.jsonl", [demonstration(a, b) for a, b in sums]),
    ("sums.jsonl", [{"prompt": f"{a}+{b}", "answer": str(a + b)} for a, b in sums]),
):
    with open(file, "w") as lines:
        lines.writelines(json.dumps(row) + "\n" for row in rows)
