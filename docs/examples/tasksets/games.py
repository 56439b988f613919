"""A taskset of verifiers: games of TextArena that one player plays, the model's own."""

import random

import textarena
import verifiers.v1 as vf
from verifiers.v1.tasksets.textarena import TextArenaData, TextArenaEnv, TextArenaTask

__all__ = ["Games", "TextArenaEnv"]


class GamesConfig(vf.TasksetConfig):
    game: str = "GuessTheNumber-v0"


class Games(vf.Taskset[TextArenaTask, GamesConfig]):
    def load(self):
        for seed in range(1000):
            random.seed(seed)
            game = textarena.make(self.config.game)
            game.reset(num_players=1)
            asked, info = game.get_observation()[1], {"game": self.config.game, "seed": seed}
            yield TextArenaTask(TextArenaData(prompt=asked.strip(), info=info))
