"""What is learnt: problems, rewards, tokenizers. Imports no torch."""

from areal_q.tasks.base import Problem, Score, Task, Tokenizer
from areal_q.tasks.order import permute, problem_at
from areal_q.tasks.registry import SCORES, TASKS, build_score, build_task, build_tokenizer
from areal_q.tasks.tokenizers import CharTokenizer, HFTokenizer, load_tokenizer

__all__ = [
    "SCORES",
    "TASKS",
    "CharTokenizer",
    "HFTokenizer",
    "Problem",
    "Score",
    "Task",
    "Tokenizer",
    "build_score",
    "build_task",
    "build_tokenizer",
    "load_tokenizer",
    "permute",
    "problem_at",
]
