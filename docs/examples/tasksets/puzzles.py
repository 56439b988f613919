"""A taskset of verifiers: problems of a dataset of reasoning-gym, with its own scorer."""

import reasoning_gym
import verifiers.v1 as vf

__all__ = ["Puzzles"]


class Puzzle(vf.TaskData):
    answer: str
    entry: dict


class PuzzleTask(vf.Task[Puzzle]):
    @vf.reward
    async def right(self, trace) -> float:
        entry = self.data.entry
        score = reasoning_gym.get_score_answer_fn(entry["metadata"]["source_dataset"])
        return score(trace.last_reply, entry)


class PuzzlesConfig(vf.TasksetConfig):
    dataset: str = "chain_sum"


class Puzzles(vf.Taskset[PuzzleTask, PuzzlesConfig]):
    def load(self):
        for entry in reasoning_gym.create_dataset(self.config.dataset, seed=0, size=1000):
            asked, answer = entry["question"], entry["answer"]
            yield PuzzleTask(Puzzle(prompt=asked, answer=answer, entry=entry))
