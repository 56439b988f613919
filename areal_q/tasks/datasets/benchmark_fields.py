"""The fields in which public benchmarks keep their problems. Imports no torch.

    answer in text      MATH            problem, solution (with \\boxed{answer})
                        MATH-500        problem, answer
                        AIME, AMC       problem or question, answer (a number or text)
                        Minerva         problem or question, solution or answer
                        OlympiadBench   question or problem, final_answer (a list) or answer
    one of choices      GPQA            Question, Correct Answer, Incorrect Answer 1 … 3
                        ARC             question, choices {text, label}, answerKey
                        MMLU-Pro        question, options, answer (a letter)

Field names are tried in the order of the constants below, and the first one that a row has is used.
"""

import hashlib
import math
from collections.abc import Sequence
from decimal import Decimal
from string import ascii_uppercase
from typing import Any

from areal_q.config.tasks import Choice, Jsonl, Math
from areal_q.decode_errors import short
from areal_q.errors import TaskError
from areal_q.tasks.base import Problem, columns_of
from areal_q.tasks.datasets.conversations import problem_of
from areal_q.tasks.datasets.gsm8k import stated
from areal_q.tasks.datasets.row_files import read_objects
from areal_q.tasks.grading.boxed import last_boxed

_Row = dict[str, Any]

QUESTION = ("problem", "question", "Problem", "Question", "prompt")
_DEFAULT = Jsonl(path="").prompt
_ANSWER = ("final_answer", "answer", "Answer", "solution", "Solution")
MATH_PROMPTS = {
    "chat": "{}\n\nReason step by step, then give the final answer in \\boxed{{}}.",
    "plain": "Problem: {}\nGive the final answer in \\boxed{{}}.\nSolution:",
}
CHOICE_PROMPTS = {
    "chat": "{}\n\nReason step by step, then end with `Answer: ` and the letter of the right choice.",
    "plain": "Question: {}\nAnswer:",
}

_WRITTEN_OUT = 1e21
"""Below it a whole number is written out; above, its digits would say more than a float knows"""


def math_problems(cfg: Math) -> list[Problem]:
    """Returns all problems of the file. Raises TaskError naming file and line."""
    return [
        Problem(
            MATH_PROMPTS[cfg.template].format(_first(row, QUESTION, where)),
            _answer(row, where),
            columns=columns_of(row, where),
        )
        for where, row in read_objects(cfg.path)
    ]


def choice_problems(cfg: Choice) -> list[Problem]:
    """Returns all problems of the file, with a letter as the answer. Raises TaskError naming file and line."""
    return [_choice(row, cfg.template, where) for where, row in read_objects(cfg.path)]


def jsonl_problems(cfg: Jsonl) -> list[Problem]:
    """Returns all problems of the file. Raises TaskError naming a line that lacks one of the two fields, or has
    an answer that no response can equal."""
    return [
        problem_of(
            _prompt(row, cfg.prompt, where),
            _readable(text_of(row, cfg.answer, where), cfg, where),
            cfg.template,
            where,
            columns_of(row, where),
        )
        for where, row in read_objects(cfg.path)
    ]


def _readable(answer: str, cfg: Jsonl, where: str) -> str:
    if cfg.grader == "final_number" and stated(answer) is None:
        raise TaskError(
            f"{where}: {cfg.answer} = {short(answer)}: final_number reads no number in it"
        )
    return answer


def _prompt(row: _Row, name: str, where: str) -> str | Sequence[Any]:
    """Returns the field, a text or a list of messages. A row without the default's has it in `messages`."""
    if name == _DEFAULT and name not in row and "messages" in row:
        name = "messages"
    match row.get(name):
        case [{}, *_] as messages:
            return messages
    text = text_of(row, name, where)
    if not text.strip():
        raise TaskError(f"{where}: field `{name}` is empty: there is nothing to answer")
    return text


def text_of(row: _Row, name: str, where: str) -> str:
    """Returns a field as text. A whole number is written out (27.0 is "27") if it is not too large (1e23 is
    "1e+23"), and a list of one entry is that entry. Raises TaskError for anything else, such as nan."""
    if name not in row:
        raise TaskError(f"{where}: no field `{name}`; the row has {', '.join(row) or 'none'}")
    value = row[name]
    if isinstance(value, list) and value and all(isinstance(v, str) for v in value):
        value = ", ".join(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < _WRITTEN_OUT:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise TaskError(f"{where}: field `{name}` is not text or a number")
    if isinstance(value, float) and not math.isfinite(value):
        raise TaskError(f"{where}: field `{name}` is not text or a number: {value}")
    return f"{value:f}" if isinstance(value, Decimal) else str(value)


def _first(row: _Row, names: Sequence[str], where: str) -> str:
    name = next((n for n in names if row.get(n) not in (None, [], "")), None)
    if name is None:
        raise TaskError(f"{where}: none of the fields {', '.join(names)}")
    return text_of(row, name, where)


def _answer(row: _Row, where: str) -> str:
    """Returns the content of the last \\boxed{} in a worked solution, else the text after `####`, else all of
    it."""
    text = _first(row, _ANSWER, where)
    boxed = last_boxed(text)
    answer = text.rpartition("####")[2] if boxed is None else boxed
    if not answer.strip():
        raise TaskError(f"{where}: the answer is empty")
    return answer.strip()


def _choice(row: _Row, template: str, where: str) -> Problem:
    if "Correct Answer" in row:
        question, options, right = _gpqa(row, where)
    else:
        question, options, right = _listed(row, where)
    if not 2 <= len(options) <= len(ascii_uppercase) or not 0 <= right < len(options):
        raise TaskError(f"{where}: choice {right + 1} of {len(options)} cannot be the right one")
    lines = [f"{ascii_uppercase[i]}. {text}" for i, text in enumerate(options)]
    asked = "\n".join([question.strip(), *lines])
    return Problem(
        CHOICE_PROMPTS[template].format(asked),
        ascii_uppercase[right],
        columns=columns_of(row, where),
    )


def _gpqa(row: _Row, where: str) -> tuple[str, list[str], int]:
    """Returns (question, choices, index of the right one). The file names the right choice first; where it is
    put depends on the question alone."""
    names = ["Correct Answer", *(f"Incorrect Answer {i}" for i in (1, 2, 3))]
    options = [text_of(row, name, where).strip() for name in names]
    question = text_of(row, "Question", where)
    right = hashlib.blake2b(question.encode()).digest()[0] % len(options)
    options[0], options[right] = options[right], options[0]
    return question, options, right


def _listed(row: _Row, where: str) -> tuple[str, list[str], int]:
    stem = row.get("question")
    if isinstance(stem, dict):  # ARC's own files
        row = {**row, "question": stem.get("stem"), "choices": stem.get("choices")}
    question = _first(row, QUESTION, where)
    options, labels = _options(row, where)
    key = row.get("answerKey", row.get("answer"))
    if isinstance(key, int) and not isinstance(key, bool):  # MMLU's index
        return question, options, key
    if key not in labels:
        raise TaskError(f"{where}: the answer {key!r} is none of the choices {', '.join(labels)}")
    return question, options, labels.index(key)


def _options(row: _Row, where: str) -> tuple[list[str], list[str]]:
    """Returns (texts, labels) of choices given as a list of texts, as {text: […], label: […]}, or as
    [{text, label}, …]."""
    match row.get("options", row.get("choices")):
        case {"text": list(texts), "label": list(labels)} if len(texts) == len(labels):
            pass
        case [{"text": _, "label": _}, *_] as entries if all(
            isinstance(e, dict) and {"text", "label"} <= e.keys() for e in entries
        ):
            texts, labels = [e["text"] for e in entries], [e["label"] for e in entries]
        case list(texts):
            labels = list(ascii_uppercase[: len(texts)])
        case _:
            raise TaskError(f"{where}: no list of choices in `options` or `choices`")
    if not all(isinstance(t, str) for t in [*texts, *labels]):
        raise TaskError(f"{where}: a choice is not text")
    return texts, labels
