"""An agent that plays two turns an episode: `python agent.py http://127.0.0.1:8000/v1 EPISODES`.

It needs `pip install openai`, and a run such as
`areal-q run configs/quickstart.toml rollout.environment.type=external rollout.serve=8000`.
"""

import sys
from typing import Any

import openai


def play(client: openai.OpenAI, model: str) -> None:
    """Plays one episode: the model, a tool that says "+", and the model again."""
    # id, prompt, answer, ticket, index, max_tokens; 503 where no episode came in 10 seconds
    episode: Any = client.post("/episodes", cast_to=object, body={"timeout_s": 10})
    mine = {"X-Episode": episode["id"]}
    prompt = episode["prompt"]
    first = client.completions.create(model=model, prompt=prompt, max_tokens=4, extra_headers=mine)
    # The next prompt begins with all that was said so far, unchanged.
    prompt += first.choices[0].text + "+"
    second = client.completions.create(model=model, prompt=prompt, max_tokens=4, extra_headers=mine)
    right = float(second.choices[0].text.strip() == episode["answer"])
    reward = {"reward": right, "parts": {"correct": right}}
    client.post(f"/episodes/{episode['id']}/reward", cast_to=object, body=reward)


def main(url: str, episodes: int) -> None:
    client = openai.OpenAI(base_url=url, api_key="none")
    model = client.models.list().data[0].id
    for _ in range(episodes):
        play(client, model)
    print(f"{episodes} episodes played")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
