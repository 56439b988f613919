"""What each grader takes for the answer, beside what a reader of the same reply takes for it."""

import json
from decimal import Decimal
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_q.config.tasks import Gsm8k, Jsonl
from areal_q.errors import TaskError
from areal_q.tasks import GRADERS, Problem, all_problems
from areal_q.tasks.datasets.gsm8k import final_number
from areal_q.tasks.grading.boxed import last_boxed
from areal_q.tasks.grading.choice import letter, offered

NUMBERS = {
    # after the mark, also if more follows
    "#### 72": "72",
    "so #### $1,200.": "1200",
    "#### 10 wrong; #### 12": "12",
    "####\n18\nNote: 3": "18",
    "#### **18**": "18",
    "#### 18 dollars": "18",
    "#### \\$18": "18",
    "#### 2e": "2",
    "#### 18%": "18",
    "#### 18.": "18",
    "#### 18kg": "18",
    "#### 18€": "18",
    "#### 18th": "18",
    "#### 18-inch": "18",
    "#### 18/day": "18",
    "#### 18: all": "18",
    "#### 18, or 3 each": "18",
    "#### 18 (3 more)": "18",
    "#### 18 - at least": "18",
    "#### _18_": "18",
    "#### 18 million": "18",
    "#### no number, but 3 before": "3",
    # signs and dashes
    "#### -5 degrees, not 7": "-5",
    "#### –5": "-5",
    "#### −5": "-5",
    "#### —5": "-5",
    "#### - 5": "-5",
    "#### -(18)": "-18",
    "#### -$5": "-5",
    "#### $-5": "-5",
    "#### minus 5": "-5",
    "= –5": "-5",
    "-(18)": "-18",
    "= -(18)": "-18",
    "The total is -(18)": "-18",
    "The answer is -($1,200).": "-1200",
    "it is 20-(3)": "3",
    "a loss of -$4.50!": "-4.5",
    "it is 20-3": "3",
    "it is 20–3": "3",
    "12 - 3 = 9.0": "9",
    # what is computed in place
    "#### 5 + 3 = 8": "8",
    "#### x = 5": "5",
    "#### <<5+3=8>>8": "8",
    "#### 2 hours 30 minutes = 150": "150",
    "#### 150 (= 2.5 hours)": "150",
    "#### 5 =": "5",
    # spellings of one number
    "#### 1e3": "1000",
    "#### 1 000": "1000",
    "#### 1\u202f000": "1000",
    "#### 1.000.000": "1000000",
    "#### 1{,}000": "1000",
    "#### 10,\\!000": "10000",
    "we get 1,234,567.": "1234567",
    "only .5 left": "0.5",
    # fractions
    "#### 3/4": "0.75",
    "#### -3 / 4 cup": "-0.75",
    "#### 2 1/2": "2.5",
    "#### -2 1/2": "-2.5",
    "#### 1,200/2": "600",
    "\\boxed{\\frac{1}{8}}": "0.125",
    "\\boxed{-\\dfrac12}": "-0.5",
    "#### 2\\frac{1}{2}": "2.5",
    "12/8 = 3/2": "1.5",
    "half of it, 1/2": "0.5",
    # a box, the word, or bold, before the last number
    "\\boxed{18} so it took 3 steps": "18",
    "\\boxed{\\text{18 eggs}} in 2 days": "18",
    "\\boxed 18, after 3 steps": "18",
    "\\boxed{18}, no: #### 19": "19",
    "The answer is 18. It took 3 steps": "18",
    "The answer is 5 + 3 = 8 after 2 days.": "8",
    "**Answer**: $18$ in 3 days": "18",
    "<answer>18</answer> in 3 steps": "18",
    "The final answer is 15 gallons * 8 pints / gallon = <<15*8=120>>120 pints": "120",
    "He can answer 20 - 11 = 9 problems": "9",
    "First 4.\nShe makes **$18** in 3 days.": "18",
    "So **Total: $18** in 3 days": "18",
    "**Step 2:** 3 + 4 = 7": "7",
    "**Step 2**: 3 + 4 = 7": "7",
    "**2. Total** is 7": "7",
    # else the last number
    "5 apples or 10%": "10",
    "choose 1,2": "2",
}


@pytest.mark.parametrize(("reply", "number"), NUMBERS.items())
def test_the_number_that_a_reader_takes(reply: str, number: str):
    assert final_number(reply) == Decimal(number)
    assert GRADERS["final_number"].score(Problem("q", number), reply).correct


@pytest.mark.parametrize("reply", ["none", "", "####", "\\boxed{x}", "the answer is unknown"])
def test_without_a_number_there_is_no_answer(reply: str):
    assert final_number(reply) is None


UNREADABLE = [
    # times, ratios, dates, versions
    *("12:30", "2:5", "3:210", "1/2/2026", "0.5.3", "1.000.00"),
    # groups of digits that are none
    *("12,345,67", "1,00,000", "1234,567", "1,5", "1_000", "1'000", "18 20"),
    # powers, other notations
    *("1e400", "2^10", "10^{3}", "10**3", "5²", "2½", "0x12", "18k", "$1.5M", "1/0"),
    # sums that are not computed
    *("10 - 5", "10-5", "10 + 5", "3 * 4", "3 x 4", "3 × 4", "3 \\times 4", "18 · $2", "5 – (3)"),
]
"""What no single number stands for, or one that two readers take in two ways"""


@pytest.mark.parametrize("text", UNREADABLE)
def test_a_beginning_of_something_else_is_no_number(text: str, tmp_path: Path):
    """Such a reply was right where the answer was its first digits, and such a label was trained on."""
    for place in ("I have 3. #### {}", "3, so \\boxed{{{}}}", "3. The answer is {} m"):
        assert final_number(place.format(text)) is None
    row = {"question": "q", "prompt": "q", "answer": f"#### {text}"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    for task in (Gsm8k, partial(Jsonl, grader="final_number")):
        with pytest.raises(TaskError, match=r"rows\.jsonl:1: .*number"):
            all_problems(task(path=str(tmp_path / "rows.jsonl")))


def test_a_fraction_equals_its_own_value_alone():
    score = GRADERS["final_number"].score
    for third in ("#### 1/3", "#### 2/6", "\\boxed{\\frac{1}{3}}", "it is 1/3"):
        assert score(Problem("q", "1/3"), third).correct
    for other in ("1", "3", "1/2", "0.3333", "1/4"):
        assert not score(Problem("q", "1/3"), f"#### {other}").correct
        assert not score(Problem("q", other), "\\boxed{1/3}").correct
    assert {GRADERS["final_number"].answer(text) for text in ("#### 2/4", "0.5", ".50")} == {"0.5"}


@pytest.mark.parametrize("label", ["1,200", "$1200", "1 200", "#### 1200", "3 * 400 = 1200"])
def test_a_label_may_be_spelled_in_other_ways_too(label: str):
    assert GRADERS["final_number"].score(Problem("q", label), "so 1200").correct


@given(value=st.decimals(-(10**9), 10**9, places=2, allow_nan=False), sign=st.sampled_from("-−–"))
def test_any_number_is_read_in_any_place(value: Decimal, sign: str):
    text = f"{value:,.2f}".replace("-", sign)
    for place in ("#### {}", "so it is {}", "\\boxed{{{}}}", "The answer is {}.", "**{}**"):
        assert final_number(place.format(text)) == value


MEANS_C = [
    # alone
    *("C", " (C)\n", "**C.**", "C. Berlin", "C) because", "c", "(c)", "It follows.\n\nC"),
    *("C\n\nBerlin is the capital of Germany.", "**C**\nIt is not A.", "A\nNo:\nC"),
    # in a box or a tag
    *(r"so \boxed{C}", r"\boxed{C. Berlin}", r"\boxed{\text{(C)}}", r"\boxed C"),
    r"Answer: A, I mean \boxed{\textbf{C}}",
    *("<answer>C</answer>", "<answer> (C) Berlin </answer>"),
    # called the answer
    *("Answer: C", "**Answer**: C", "**Answer:** C", "ANSWER: C", "Answer:\nC", "Answer - C"),
    *("Answer: $C$", r"Answer: \(C\)", 'Answer "C', "Answer: `C`", "Answer: [C]", "answer: (c)"),
    *("The answer is 'C'", r"The answer is \textbf{C}", "the answer is **(C)**.", "Answer：C"),
    *("The correct answer must be C.", "The answer is option C.", "Answer: Option C"),
    *("Answer: C, not A", "Answer: C because A is wrong", "The answer is: C. A is not the answer."),
    "Answer: A\n\nwait\n\nAnswer: C",
    *("答案：C", "答案是C。", "Réponse : C", "La réponse: (C)"),
    # concluded
    "Answer: I believe it is C",
    "Option A is wrong, B is wrong, so it must be C",
    "The answer is not A but C",
    "The answer to this question is C.",
    "Not option A. The correct choice is C.",
    *("I choose C.", "I'd go with (C)", "It's C", "Therefore, C", "C is correct.", "Choice C"),
    "Option A isn't, so (C) is the right one.",
    # named, its letter in brackets behind it
    *("The answer is Berlin (C).", "Answer: Berlin (C)", "The answer is **Berlin** (C)."),
    *("The answer is Berlin [C].", "The answer is **Berlin (C)**", "The answer is 3.5 m/s (C)."),
    *("Berlin (C).", "I choose Berlin (C).", "So it must be Berlin (C), not Paris (A)."),
    *("It is not Bern, the answer is Berlin (C).", "It can't be Rome (A). It must be Berlin (C)."),
    *("It's Berlin (C)!", "The answer is not Paris (A) but Berlin (C)."),
    "The answer is Paris (A)? No, the answer is Berlin (option C).",
    "The answer is Berlin (C), since it is larger than Bern (D).",
]
NO_LETTER = [
    *("", "Berlin", "A dog is an animal", "The answer is a dog", "The answer is Answering"),
    *("Answer: I am not sure", "Option A is wrong", "The answer isn't clear.", "Answer: Yes"),
    *("Answer: E", "So I think"),
    *("Not Paris (A).", "The answer is not Paris (A).", "It isn't Paris (A)"),
    *(
        "The answer cannot be Berlin (C).",
        "The answer can't be Berlin (C).",
        "It's never Berlin (C).",
    ),
    *(
        "I would not pick Berlin (C).",
        "My answer will not be Berlin (C)",
        "I would exclude Berlin (C)",
    ),
    *("It is either Paris (A) or Berlin (C).", "It is Paris (A) or Berlin (C)."),
    *("Rome (A)\nParis (B)\nBerlin (C)", "The answer is Paris. Berlin (C) has a tower."),
    *("The answer Paris (A) is wrong.", "The answer is pi (E)."),
]
CHOICES = "Which?\nA. Rome\nB. Paris\nC. Berlin\nD. Bern\nAnswer:"


@pytest.mark.parametrize("reply", MEANS_C)
def test_the_letter_that_a_reader_takes(reply: str):
    assert letter(reply) == "C"
    for right in "ABCD":
        score = GRADERS["choice"].score(Problem(CHOICES, right), reply)
        assert score.correct is (right == "C")


@pytest.mark.parametrize("reply", NO_LETTER)
def test_a_reply_without_a_choice_has_no_letter(reply: str):
    assert letter(reply, offered(Problem(CHOICES, "A"))) is None


@pytest.mark.parametrize(
    ("prompt", "letters"),
    [
        (CHOICES, "ABCD"),
        ("Which?\n(A) one\n(B) two", "AB"),
        ("Which of A. and B.?", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        ("A. one\nB. two", "ABCDEFGHIJKLMNOPQRSTUVWXYZ"),  # the right one is C
    ],
)
def test_only_the_letters_of_the_prompt_count(prompt: str, letters: str):
    right = "C" if letters != "AB" else "A"
    assert offered(Problem(prompt, right)) == letters


BOXES = {
    r"\boxed{1} then \boxed{ 2 }": "2",
    r"\boxed{\frac{1}{\sqrt{2}}}": r"\frac{1}{\sqrt{2}}",
    r"\boxed{1} then \boxed{2": "1",
    r"\boxed 3": "3",
    r"so $\boxed -3$.": "-3",
    r"\boxed 1,200.": "1,200",
    r"\boxed {5}": "5",
    r"\boxed x": "x",
    r"\fbox{5}": "5",
    r"\boxed{2} then \boxed 5": "5",
    r"\boxed 5 then \boxed{2}": "2",
    r"\boxedness 3": None,
    "\\boxed{" * 3000: None,
}


@pytest.mark.parametrize(("text", "expected"), BOXES.items())
def test_the_last_box_counts_if_its_braces_balance(text: str, expected: str | None):
    assert last_boxed(text) == expected


MATHS = [
    ("5", r"\boxed 5", True),
    ("5", r"\fbox{5}", True),
    ("2000", r"\boxed{2\,000}", True),
    ("2000", r"\boxed{2{,}000}", True),
    (r"10,\!000", r"\boxed{10000}", True),
    ("(1,200)", r"\boxed{(1,\,200)}", True),
    ("1200", r"\boxed{(1,\,200)}", False),
    ("18", r"\boxed{18 dollars}", True),
    ("18", r"\boxed{18 square inches}", True),
    ("18", r"\boxed{\$18}", True),
    ("18 dollars", r"\boxed{18}", True),
    ("18", r"\boxed{18 million}", False),
    ("2", r"\boxed{2 pi}", False),
    ("8", r"\boxed{5 + 3 = 8}", True),
    ("5", r"\boxed{5 + 3 = 8}", False),
    ("-5", r"\boxed{−5}", True),
    ("5", r"\boxed{5} or \boxed{6}", False),
    ("1000", r"\boxed{1e3}", True),
    ("1.5e-2", r"\boxed{0.015}", True),
    ("-1e+3", r"\boxed{-1000}", True),
    ("1000", r"\boxed{1e4}", False),
    ("e", r"\boxed{1e1}", False),
]


@pytest.mark.parametrize(("answer", "reply", "correct"), MATHS)
def test_a_box_has_the_value_that_a_reader_sees(answer: str, reply: str, correct: bool):
    assert GRADERS["math"].score(Problem("p", answer), reply).correct is correct


REPEATED = ["1,", "1.", "#### 1 000 ", "#### (==", "answer is ", "answer:** ", "**1", "\\boxed{"]
REPEATED += ["\\boxed ", "it is option ", "A) ", "so I ", "- ", "'", "1e", "="]
REPEATED += ["1/", "1 1/", "1:", "1,00", "-(1", "\\frac1", "1_", "1e9"]
REPEATED += ["The answer is Berlin (C). ", "1", "**1** "]


@pytest.mark.parametrize("piece", REPEATED)
def test_a_long_reply_is_read_in_linear_time(piece: str):
    """A search that took the square of the length would take minutes for these."""
    text = "**" + piece * 50_000 + "x"
    for read in (final_number, letter, last_boxed):
        read(text)


@pytest.mark.parametrize(
    ("grader", "answer", "reply"),
    [
        ("exact", " Paris", "Paris"),
        ("exact", "Paris\n", "Paris "),
        ("choice", "b", "Answer: B"),
        ("choice", " B ", "Answer: B"),
    ],
)
def test_an_answer_in_the_data_is_read_as_people_write_it(grader: str, answer: str, reply: str):
    """All rewards were 0 for a column that a CSV file begins with a space, or letters that are small."""
    assert GRADERS[grader].score(Problem("q", answer), reply).correct
