"""Objectives and advantages that are functions of the user's own."""

from pathlib import Path

import pytest
import torch
from helpers.paths import ROOT

from areal_q.algorithms import (
    LossInputs,
    group_advantages,
    learns_without_advantage,
    loss_fn,
    reduce_metrics,
)
from areal_q.algorithms.python_code import try_out
from areal_q.config import (
    AdvantageConfig,
    DrGrpo,
    Grpo,
    ObjectiveConfig,
    Ppo,
    PythonAdvantage,
    PythonObjective,
    Tis,
)
from areal_q.errors import TaskError

OWN_TIS = str(ROOT / "tests" / "helpers" / "own_code" / "own_tis.py")
PULL = (
    "def objective(x, beta=0.1):\n"
    "    r = x.log_ratio.exp()\n"
    "    return x.advantages * r - beta * (r - 1) ** 2\n"
)
"""It draws the ratio to 1 also where there is no advantage."""


def inputs(tokens: int = 400) -> LossInputs:
    g = torch.Generator().manual_seed(0)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(tokens, generator=g)

    proximal = -normal(2.0).abs()
    return LossInputs(
        logprobs=(proximal + normal(0.2)).requires_grad_(),
        proximal_logprobs=proximal,
        behavior_logprobs=proximal + normal(0.6),
        advantages=normal(1.0),
        mask=torch.rand(tokens, generator=g) < 0.9,
        sequence_ids=torch.arange(tokens) // 20,
        num_sequences=tokens // 20,
        version_lag=torch.randint(0, 4, (tokens,), generator=g),
    )


def learnt(cfg: ObjectiveConfig) -> tuple[float, list[float], dict[str, float]]:
    given = inputs()
    out = loss_fn(given, cfg)
    out.loss.backward()
    assert given.logprobs.grad is not None
    return out.loss.item(), given.logprobs.grad.tolist(), reduce_metrics([out.metrics])


@pytest.mark.parametrize("cap", [2.0, 1.2])
def test_tis_written_by_a_user_is_tis_bit_for_bit(cap: float):
    own = PythonObjective(path=OWN_TIS, settings={"cap": cap})
    assert learnt(own) == learnt(Tis(cap=cap)) != learnt(Ppo())


def test_an_own_advantage_takes_the_place_of_a_built_in_one(tmp_path: Path):
    source = "import torch\ndef advantage(rewards, group_ids, scale=1.0):\n"
    source += "    means = torch.stack([rewards[group_ids == g].mean() for g in group_ids])\n"
    (tmp_path / "mine.py").write_text(f"{source}    return scale * (rewards - means)\n")
    own = PythonAdvantage(path=str(tmp_path / "mine.py"), settings={"scale": 2.0})
    rewards, ids = torch.tensor([1.0, 0, 1, 1, 0, 3]), torch.tensor([0, 0, 1, 0, 1, 1])
    expected = 2 * group_advantages(rewards, ids, DrGrpo())
    torch.testing.assert_close(group_advantages(rewards, ids, own), expected)


def test_an_objective_that_learns_without_advantage_is_known(tmp_path: Path):
    (tmp_path / "mine.py").write_text(PULL)
    own = PythonObjective(path=str(tmp_path / "mine.py"))
    assert learns_without_advantage(own)
    still = PythonObjective(path=own.path, settings={"beta": 0.0})
    assert not learns_without_advantage(still)
    assert not learns_without_advantage(PythonObjective(path=OWN_TIS))
    assert not learns_without_advantage(Tis())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return x.lag", "mine.py:3: AttributeError: 'Ratios' object has no attribute 'lag'"),
        ("return 3.0", "mine.py:2: gave float where a tensor [8] is due"),
        ("return x.log_ratio.sum()", "mine.py:2: gave [] where a tensor [8] is due"),
        (
            "return PolicyLoss(x.log_ratio, clipped_up=x.mask[:2])",
            "mine.py:2: gave [2] where a tensor [8] is due",
        ),
        ("return x.advantages", "mine.py:2: J has no gradient"),
        ("x.log_ratio", "mine.py:2: gave NoneType where a tensor [8] is due"),
        ("return x.log_ratio * float('nan')", "mine.py:2: J, or its gradient, is not finite"),
        ("return x.log_ratio + float('nan')", "mine.py:2: J, or its gradient, is not finite"),
    ],
)
def test_a_bad_objective_is_named_with_its_line_at_the_check(tmp_path: Path, body: str, said: str):
    source = f"from areal_q.algorithms import PolicyLoss\ndef objective(x, cap=2.0):\n    {body}\n"
    refused(tmp_path, source, said)


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def advantage(rewards, ids):\n    return rewards[:2]\n", "mine.py:1: gave [2] where"),
        (
            "def advantage(rewards, ids):\n    return rewards / 0\n",
            "mine.py:1: gave an advantage that",
        ),
        (
            "def advantage(rewards):\n    return rewards\n",
            "mine.py:1: TypeError: advantage() takes 1",
        ),
    ],
)
def test_a_bad_advantage_is_named_with_its_line_at_the_check(
    tmp_path: Path, source: str, said: str
):
    refused(tmp_path, source, said, PythonAdvantage(path=str(tmp_path / "mine.py")))


def refused(
    directory: Path, source: str, said: str, advantage: AdvantageConfig | None = None
) -> None:
    (directory / "mine.py").write_text(source)
    own = PythonObjective(path=str(directory / "mine.py"))
    with pytest.raises(TaskError) as raised:
        try_out(Tis() if advantage else own, advantage or Grpo())
    assert said in str(raised.value)


def test_a_setting_that_the_function_lacks_is_named():
    with pytest.raises(TaskError, match="unexpected keyword argument 'capp'"):
        try_out(PythonObjective(path=OWN_TIS, settings={"capp": 1}), Grpo())
