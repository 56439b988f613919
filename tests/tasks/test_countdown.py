"""Countdown: solvable, deterministic, split by numbers; expressions against Python's own arithmetic."""

import ast
import operator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config import Countdown
from areal_q.errors import TaskError
from areal_q.tasks import GRADERS, CharTokenizer, Problem, build_task
from areal_q.tasks.datasets.countdown import evaluate

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}


def by_python(expression: str) -> Fraction:
    """Python's grammar and precedence, exact rationals."""

    def value(node: ast.expr) -> Fraction:
        if isinstance(node, ast.Constant):
            assert isinstance(node.value, int)
            return Fraction(node.value)
        assert isinstance(node, ast.BinOp)
        return OPERATORS[type(node.op)](value(node.left), value(node.right))

    return value(ast.parse(expression, mode="eval").body)


def asked(problem: Problem) -> tuple[list[int], int]:
    listed, target = problem.prompt.removesuffix("=").split(" ")
    return sorted(map(int, listed.split(","))), int(target)


@pytest.mark.parametrize("numbers", [2, 3, 4, 6])
def test_every_problem_has_the_solution_that_it_comes_with(numbers: int):
    cfg = Countdown(numbers=numbers, heldout=50)
    task, score = build_task(cfg), GRADERS[cfg.grader].score
    for problem in [*task.train[:300], *task.heldout]:
        given_numbers, target = asked(problem)
        assert len(given_numbers) == numbers and 1 <= target <= 100
        assert by_python(problem.answer) == target
        assert sorted(int(t) for t in _tokens(problem.answer) if t.isdigit()) == given_numbers
        assert score(problem, problem.answer).correct
        CharTokenizer().encode(problem.prompt + problem.answer)


def test_problems_are_stable_and_held_out_numbers_never_trained():
    one, other = build_task(Countdown()), build_task(Countdown())
    assert [*one.heldout] == [*other.heldout] and [*one.train[:99]] == [*other.train[:99]]
    assert len({p.prompt for p in one.heldout}) == 256
    trained = {tuple(asked(p)[0]) for p in one.train[:3000]}
    assert not trained & {tuple(asked(p)[0]) for p in one.heldout}


def test_settings_that_leave_too_few_problems_are_refused():
    with pytest.raises(TaskError, match=r"task\.heldout = 5000: not much more than \d+"):
        build_task(Countdown(numbers=2, largest=9, heldout=5000))


@pytest.mark.parametrize(
    ("response", "correct"),
    [
        ("3*5+7", True),
        ("7+5*3=22", True),
        ("(3*5)+7", True),
        ("so I think:\n 7 + 3 * 5", True),
        ("3+5 <answer>3*5+7</answer>", True),
        ("<answer>3*5+7</answer> or <answer>3+5+7</answer>", False),
        ("3*(5+7)", False),
        ("22", False),
        ("15+7", False),
        ("3*5+7+0", False),
        ("3*5+7-7+7", False),
        ("", False),
        ("3*5+7)", False),
        ("(3*5+7", False),
        ("3**5+7", False),
        ("__import__('os')", False),
        ("3*5+٧", False),
        ("3*5+-7", False),
        ("(" * 150, False),
        ("1" * 5000, False),
        ("3/(5-5)+7", False),
    ],
)
def test_the_reward_is_for_the_value_with_exactly_these_numbers(response: str, correct: bool):
    score = GRADERS[Countdown().grader].score
    assert score(Problem("3,5,7 22=", "3*5+7"), response).correct is correct


@st.composite
def expressions(draw: st.DrawFn, depth: int = 3) -> str:
    if depth == 0 or draw(st.booleans()):
        return str(draw(st.integers(0, 30)))
    left, right = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    text = left + draw(st.sampled_from("+-*/")) + right
    return f"({text})" if draw(st.booleans()) else text


@given(expressions())
def test_an_expression_has_the_value_that_python_gives_it(expression: str):
    try:
        expected = by_python(expression)
    except ZeroDivisionError:
        assert evaluate(expression) is None
        return
    result = evaluate(expression)
    assert result is not None and result[0] == expected


@given(st.text(alphabet="0123456789+-*/() ", max_size=30))
def test_what_python_refuses_is_no_expression(text: str):
    result = evaluate(text)
    if result is not None:
        plain = " ".join(t.lstrip("0") or "0" if t.isdigit() else t for t in _tokens(text))
        assert by_python(plain) == result[0]


def _tokens(text: str) -> list[str]:
    spaced = "".join(c if c.isdigit() else f" {c} " for c in text)
    return spaced.split()
