import areal_q


def reward(response, row):
    right = response == row["answer"]
    why = "" if right else f"{row['answer']} it is"
    return {"reward": float(right), "carries": row["carries"], "why": why}


sums = [(a, b) for a in range(40) for b in range(40)]
carries = [(a % 10 + b % 10) // 10 for a, b in sums]
rows = [
    {"prompt": f"{a}+{b}=", "answer": str(a + b)[::-1], "carries": c}
    for (a, b), c in zip(sums, carries, strict=True)
]
run = areal_q.train(data=rows, reward=reward, steps=20, settings={"warmstart.steps": 200})
print(run.accuracy, areal_q.report(run))
