import areal_q


def reward(response, answer):
    return float(response == answer)


numbers = [7 * i % 1000 for i in range(1000)]
rows = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)[::-1]} for n in numbers]
run = areal_q.train(data=rows, reward=reward, steps=40, settings={"warmstart.steps": 100})
print(run.accuracy, areal_q.report(run))
