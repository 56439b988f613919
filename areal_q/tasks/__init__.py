"""Tasks: problems, their rewards, and tokenizers. Imports no torch."""

from areal_q.tasks.base import Completed, Grader, Problem, Score, Stop, Task, Tokenizer
from areal_q.tasks.encoding.hf_tokenizer import HFTokenizer
from areal_q.tasks.encoding.tokenizer import CharTokenizer, load_tokenizer
from areal_q.tasks.grading.graders import GRADERS
from areal_q.tasks.grading.rewards import (
    Opinion,
    Reward,
    answer_of,
    build_reward,
    check_reward,
    columns_for,
    columns_of_one,
    has_own_reward,
    second_opinion,
    try_start,
    unscored,
)
from areal_q.tasks.registry import (
    TASKS,
    all_problems,
    asked_of,
    build_task,
    build_tokenizer,
    check_characters,
    task_types,
    told_of,
)
from areal_q.tasks.shuffle import permute, problem_at
from areal_q.tasks.stops import judged_text, logged_response, stop_strings, stops_text, without_end

__all__ = [
    "GRADERS",
    "TASKS",
    "CharTokenizer",
    "Completed",
    "Grader",
    "HFTokenizer",
    "Opinion",
    "Problem",
    "Reward",
    "Score",
    "Stop",
    "Task",
    "Tokenizer",
    "all_problems",
    "answer_of",
    "asked_of",
    "build_reward",
    "build_task",
    "build_tokenizer",
    "check_characters",
    "check_reward",
    "columns_for",
    "columns_of_one",
    "has_own_reward",
    "judged_text",
    "load_tokenizer",
    "logged_response",
    "permute",
    "problem_at",
    "second_opinion",
    "stop_strings",
    "stops_text",
    "task_types",
    "told_of",
    "try_start",
    "unscored",
    "without_end",
]
