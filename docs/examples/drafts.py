"""An agent that keeps only the beginning of its draft: `python drafts.py http://127.0.0.1:8000/v1 EPISODES`."""

import sys
from typing import Any

import openai


def play(client: openai.OpenAI, model: str) -> None:
    """Plays one episode of two requests, the second of which is no continuation of the first: it branches."""
    episode: Any = client.post("/episodes", cast_to=object, body={"timeout_s": 60})
    asked: Any = {"model": model, "max_tokens": 4, "extra_headers": {"X-Episode": episode["id"]}}
    draft = client.completions.create(prompt=episode["prompt"], **asked).choices[0].text
    kept = draft[:1]
    rest = client.completions.create(prompt=episode["prompt"] + kept, **asked).choices[0].text
    right = float((kept + rest).strip() == episode["answer"])
    reward = {"reward": right, "parts": {"correct": right}}
    client.post(f"/episodes/{episode['id']}/reward", cast_to=object, body=reward)


if __name__ == "__main__":
    client = openai.OpenAI(base_url=sys.argv[1], api_key="none")
    model = client.models.list().data[0].id
    for _ in range(int(sys.argv[2])):
        play(client, model)
