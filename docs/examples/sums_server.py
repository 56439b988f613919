"""An environment of OpenEnv: a sum, with a second attempt."""

import random

from openenv.core.env_server import http_server, interfaces, types


class Said(types.Action):
    text: object  # a reply that is JSON, such as a number, comes as what it is


class Heard(types.Observation):
    text: str


class Sums(interfaces.Environment):
    state, SUPPORTS_CONCURRENT_SESSIONS = types.State(), True

    def reset(self, seed=None, episode_id=None, **others):
        self.state = types.State(step_count=0)
        self.a, self.b = random.Random(seed).sample(range(10, 100), 2)
        return Heard(text=f"{self.a}+{self.b}")

    def step(self, action, timeout_s=None, **others):
        self.state.step_count += 1
        right = str(action.text) == str(self.a + self.b)
        return Heard(text="again", done=right or self.state.step_count > 1, reward=float(right))


app = http_server.create_fastapi_app(Sums, Said, Heard, max_concurrent_envs=64)
