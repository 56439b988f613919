"""A user's reward against a second opinion: does it call wrong answers right, or right ones wrong?"""

from collections.abc import Sequence

from areal_q.config import Run
from areal_q.messages import Group
from areal_q.tasks import Problem, Tokenizer, logged_response, second_opinion


class RewardCheck:
    """Counts, for a run whose rewards come from a user's file, where the task's own grader says otherwise."""

    def __init__(self, run: Run, tokenizer: Tokenizer) -> None:
        self._opinion, self._tokenizer = second_opinion(run), tokenizer

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Returns how many responses are right and how many wrong by the second opinion, and of how many of
        each the reward says the opposite; nothing without one. Of each group one response is looked at, so
        that it costs little."""
        if self._opinion is None:
            return {}
        right, wrong = "reward/right", "reward/wrong"
        refused, accepted = "reward/right_refused", "reward/wrong_accepted"
        counts: dict[str, float] = dict.fromkeys((right, refused, wrong, accepted), 0.0)
        for group in groups:
            for t in group.valid_trajectories[:1]:
                text = logged_response(group.ticket, t, self._tokenizer).text
                opinion = self._opinion(Problem.of_ticket(group.ticket), text)
                correct = bool(t.reward_parts.get("correct"))
                counts[right] += opinion is True
                counts[refused] += opinion is True and not correct
                counts[wrong] += opinion is False
                counts[accepted] += opinion is False and correct
        return counts
