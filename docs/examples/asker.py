"""A taskset of verifiers: sums, which the model may ask for with `?` before it answers."""

import random

import verifiers.v1 as vf

__all__ = ["Asker", "Sums"]


class Sum(vf.TaskData):
    answer: str


class Sums(vf.Taskset[vf.Task[Sum], vf.TasksetConfig]):
    def load(self):
        rng = random.Random(0)
        for _ in range(1000):
            a, b = rng.randrange(10, 100), rng.randrange(10, 100)
            yield vf.Task[Sum](Sum(prompt=f"{a}+{b}", answer=str(a + b)))


class Asker(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as talk:
            said = (await talk.turn()).last_reply
            if said == "?":
                said = (await talk.turn(task.data.answer)).last_reply
        talk.trace.record_reward("right", float(said == task.data.answer))
        talk.trace.record_metric("correct", float(said == task.data.answer))
