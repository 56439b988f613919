import asyncio

import areal_q


async def main() -> None:
    learner = areal_q.Learner(settings={"warmstart.steps": 200, "learner.optimizer.lr": 1e-3})
    base = learner.save("runs/base")
    async with areal_q.Rollout(base) as rollout:
        for _ in range(5):
            prompts = [f"{a}+{a}=" for a in range(10, 26)]
            drawn = await rollout.generate(prompts, n=8, max_tokens=4)
            rewards = [
                [float(c.text == str(2 * a)[::-1]) for c in some]
                for a, some in zip(range(10, 26), drawn, strict=True)
            ]
            groups = [areal_q.group(c, r) for c, r in zip(drawn, rewards, strict=True)]
            metrics = learner.step(groups)
            await rollout.load(learner)
            print(learner.version, metrics["reward/mean"], metrics["train/loss"])


asyncio.run(main())
