"""Tasks: problems, their rewards, and tokenizers. Imports no torch."""

from areal_q.tasks.base import Grader, Problem, Score, Task, Tokenizer
from areal_q.tasks.grading.graders import GRADERS
from areal_q.tasks.grading.rewards import (
    Reward,
    answer_of,
    build_reward,
    build_score,
    check_reward,
    unscored,
)
from areal_q.tasks.registry import (
    TASKS,
    all_problems,
    build_task,
    build_tokenizer,
    check_characters,
    task_types,
)
from areal_q.tasks.shuffle import permute, problem_at
from areal_q.tasks.tokenizer import CharTokenizer, HFTokenizer, load_tokenizer

__all__ = [
    "GRADERS",
    "TASKS",
    "CharTokenizer",
    "Grader",
    "HFTokenizer",
    "Problem",
    "Reward",
    "Score",
    "Task",
    "Tokenizer",
    "all_problems",
    "answer_of",
    "build_reward",
    "build_score",
    "build_task",
    "build_tokenizer",
    "check_characters",
    "check_reward",
    "load_tokenizer",
    "permute",
    "problem_at",
    "task_types",
    "unscored",
]
