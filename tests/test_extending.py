"""docs/extending.md: the edits that it lists are made in a copy of the tree, and what was added works there."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from helpers.paths import ROOT

from areal_q.algorithms import OBJECTIVES, group_advantages
from areal_q.algorithms.python_code import try_out
from areal_q.config import (
    EnvironmentConfig,
    ObjectiveConfig,
    OptimizerConfig,
    SamplerConfig,
    SingleTask,
    load,
)
from areal_q.config.engines import EngineConfig
from areal_q.config.run import FormatName
from areal_q.quant import FORMATS
from areal_q.tasks.registry import TASKS
from buffer.sampling.samplers import SAMPLERS
from learner.optim.build import OPTIMIZERS
from rollout.engines import ENGINES
from rollout.environments.registry import ENVIRONMENTS

PAGE = ROOT / "docs" / "extending.md"
PACKAGES = ("areal_q", "buffer", "learner", "rollout")
HAND_ON = "areal_q/config/__init__.py"
Edits = dict[str, list[tuple[str, str]]]
"""By file: pairs of a pattern that occurs once in it and what replaces it; ("", text) is a new file"""


def struct(name: str, union: str, fields: str = "") -> list[tuple[str, str]]:
    """Returns the edits that define a settings' Struct with tag "mine" before a union and add it to that."""
    body = f'    """Mine."""\n{fields}'
    head = f'class {name}(TaggedSettings, frozen=True, kw_only=True, tag="mine"):\n{body}\n\n'
    return [(f"\n{union} = ", f"\n{head}{union} = {name} | ")]


def handed_on(module: str, name: str) -> list[tuple[str, str]]:
    return [(rf"(from areal_q\.config\.{module} import \(\n)", rf"\1    {name} as {name},\n")]


def registered(registry: str, line: str, define: str = "") -> list[tuple[str, str]]:
    """Returns the edit that adds a line to a registry, and a definition before it."""
    return [(rf"\n({registry}(?:: .*)? = [{{(])", rf"\n{define}\1{line}")]


EDITS: dict[str, Edits] = {
    "An objective": {
        "areal_q/config/objectives.py": struct("MyObjective", "ObjectiveConfig"),
        HAND_ON: handed_on("objectives", "MyObjective"),
        "areal_q/algorithms/policy_losses.py": registered(
            "OBJECTIVES",
            "MyObjective: mine,",
            "from areal_q.config import MyObjective\n\n\ndef mine(x, cfg):\n    return ppo(x, Ppo())\n\n\n",
        ),
    },
    "An advantage": {
        "areal_q/config/objectives.py": struct("MyAdvantage", "AdvantageConfig"),
        HAND_ON: handed_on("objectives", "MyAdvantage"),
        "areal_q/algorithms/advantages.py": registered(
            "GROUP_ADVANTAGES",
            "MyAdvantage: mine,",
            "from areal_q.config import MyAdvantage\n\n\n"
            "def mine(rewards, ids, cfg):\n    return 2 * rewards\n\n\n",
        ),
    },
    "A number format": {
        "areal_q/quant/formats/mine.py": [
            (
                "",
                "from areal_q.quant.formats.int8 import Int8\n\n\nclass Mine(Int8):\n    name = 'mine'\n",
            )
        ],
        "areal_q/quant/registry.py": registered(
            "_ALL", "Mine(), ", "from areal_q.quant.formats.mine import Mine\n\n"
        ),
        "areal_q/config/run.py": [(r"\n(FormatName = Literal\[)", r'\n\1"mine", ')],
    },
    "An engine": {
        "areal_q/config/engines.py": struct("MyEngine", "EngineConfig", "    slots: Count = 4\n"),
        HAND_ON: handed_on("engines", "MyEngine"),
        "rollout/engines/mine.py": [
            (
                "",
                "from areal_q.config import ScriptedEngine\n"
                "from rollout.engines.scripted import scripted_engine\n\n\n"
                "def my_engine(config):\n    return scripted_engine(ScriptedEngine())\n",
            )
        ],
        "rollout/engines/__init__.py": registered(
            "ENGINES", '"mine": "rollout.engines.mine:my_engine",'
        ),
    },
    "An environment": {
        "areal_q/config/environments.py": struct("MyEnvironment", "EnvironmentConfig"),
        HAND_ON: handed_on("environments", "MyEnvironment"),
        "rollout/environments/mine.py": [
            (
                "",
                "from rollout.environments.base import Environment\n\n\nclass Mine(Environment):\n"
                "    async def __call__(self, ticket, responses):\n        pass\n",
            )
        ],
        "rollout/environments/registry.py": registered(
            "ENVIRONMENTS",
            "MyEnvironment: lambda run, client, config: Mine(),",
            "from areal_q.config import MyEnvironment\nfrom rollout.environments.mine import Mine\n\n",
        ),
    },
    "A task": {
        "areal_q/config/tasks.py": struct(
            "MyTask", "SingleTask", '    grader: ClassVar[str] = "exact"\n'
        ),
        HAND_ON: handed_on("tasks", "MyTask"),
        "areal_q/tasks/datasets/mine.py": [
            (
                "",
                "from areal_q.tasks.base import Problem\n\n\nclass Mine:\n    def __init__(self, cfg):\n"
                "        self.train, self.heldout = [Problem('1=', '1')], [Problem('2=', '2')]\n",
            )
        ],
        "areal_q/tasks/registry.py": registered(
            "TASKS",
            "MyTask: Mine,",
            "from areal_q.config import MyTask\nfrom areal_q.tasks.datasets.mine import Mine\n\n",
        ),
    },
    "A sampler": {
        "areal_q/config/buffer.py": struct("MySampler", "SamplerConfig"),
        HAND_ON: handed_on("buffer", "MySampler"),
        "buffer/sampling/samplers.py": registered(
            "SAMPLERS",
            "MySampler: Mine,",
            "from areal_q.config import MySampler\n\n\nclass Mine(FifoSampler):\n    pass\n\n\n",
        ),
    },
    "A log column": {
        "buffer/logs/step_log.py": [
            (r"_SCHEMA_VERSION = 1\n", "_SCHEMA_VERSION = 2\n"),
            (r"(    metrics: dict\[str, float\]\n)", r"\1    mine: int = 0\n"),
        ],
        "learner/measure/step_logs.py": [(r"(StepRecord\(\n)", r"\1            mine=7,\n")],
    },
    "A metric": {
        "areal_q/observability/metric_table.py": registered(
            "METRICS", 'Metric("mine/share", "share", "Mine."),'
        ),
        "learner/train_step.py": [(r"(return values \| \{\n)", r'\1        "mine/share": 1.0,\n')],
    },
}
USED = """
import json, sys
from pathlib import Path
import torch
from areal_q.algorithms.advantages import group_advantages
from areal_q.algorithms.policy_losses import OBJECTIVES
from areal_q.config import load
from areal_q.observability.metric_table import describe
from areal_q.quant import FORMATS
from areal_q.tasks.registry import build_task
from buffer.logs.step_log import StepLog, StepRecord, iter_steps
from buffer.sampling.samplers import build_sampler
from learner.train_step import train_step
from learner.loop import Learner
from rollout.engines import build_engine
from rollout.environments.registry import build_environment

run = load(None, ["learner.objective.type=mine", "learner.advantage.type=mine", "rollout.format=mine",
    "rollout.engine.type=mine", "rollout.environment.type=mine", "task.type=mine", "buffer.sampler.type=mine"])
record = StepRecord(step=0, tickets=[], seeds=[], base_digest="", digest="", fork=0, settings="", machine="",
    metrics={}, mine=7)
log = StepLog(sys.argv[1])
log.append(record)
log.close()
weight = torch.eye(4)
mine = FORMATS[run.rollout.format]
print(json.dumps({
    "An objective": OBJECTIVES[type(run.learner.objective)].__name__,
    "An advantage": group_advantages(torch.ones(2), torch.tensor([0, 0]), run.learner.advantage).tolist(),
    "A number format": torch.equal(mine.dequantize(mine.quantize(weight, "w")), weight),
    "An engine": build_engine(run.rollout.engine).name,
    "An environment": type(build_environment(run, None)).__module__,
    "A task": build_task(run.task).heldout[0].answer,
    "A sampler": type(build_sampler(run.buffer.sampler)).__name__,
    "A log column": [row.mine for row in iter_steps(Path(sys.argv[1]))],
    "A metric": describe("mine/share").meaning,
}))
"""
SEEN = {
    "An objective": "mine",
    "An advantage": [2.0, 2.0],
    "A number format": True,
    "An engine": "scripted",
    "An environment": "rollout.environments.mine",
    "A task": "2",
    "A sampler": "Mine",
    "A log column": [7],
    "A metric": "Mine.",
}


def listed(kind: str) -> list[str]:
    """Returns the files of the numbered edits that the page lists for `kind`, with "mine" for NAME."""
    text = PAGE.read_text()
    section = text.partition(f"### {kind}\n")[2].split("\n##")[0]
    files = re.findall(r"^\d+\. `([^`]+)`", section, re.MULTILINE)
    return [file.replace("NAME", "mine") for file in files]


def edit(file: Path, old: str, new: str) -> None:
    if not old:
        file.write_text(new)
        return
    text, count = re.subn(old, new, file.read_text())
    assert count == 1, f"{file}: {old!r} occurs {count} times"
    file.write_text(text)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a copy of the tree answers after all the edits."""
    copy = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / package, copy / package, ignore=ignored)
    for edits in EDITS.values():
        for file, pairs in edits.items():
            for old, new in pairs:
                edit(copy / file, old, new)
    done = subprocess.run(
        [sys.executable, "-c", USED, str(copy / "steps")],
        cwd=copy,
        env=os.environ | {"PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_the_page_s_own_loss_and_advantage_are_taken(tmp_path: Path):
    """And the check that `areal-q check` makes finds nothing to say of them."""
    blocks = re.findall(r"```python\n# (\w+\.py)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, source in blocks:
        (tmp_path / name).write_text(source)
    loss, gain = tmp_path / "loss.py", tmp_path / "gain.py"
    run = load(None, [f'learner.objective.path="{loss}"', f'learner.advantage.path="{gain}"'])
    try_out(run.learner.objective, run.learner.advantage)
    given = group_advantages(torch.tensor([2.0, 0.0]), torch.tensor([0, 0]), run.learner.advantage)
    torch.testing.assert_close(given, torch.tensor([1.0, -1.0]) / 1.1)


@pytest.mark.parametrize("kind", EDITS)
def test_page_lists_the_edits_that_are_made(kind):
    assert listed(kind) == [*EDITS[kind]]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", EDITS)
def test_listed_edits_are_enough(kind, seen):
    assert seen[kind] == SEEN[kind]


@pytest.mark.parametrize(
    ("registry", "union"),
    [
        (OBJECTIVES, ObjectiveConfig),
        (ENVIRONMENTS, EnvironmentConfig),
        (TASKS, SingleTask),
        (SAMPLERS, SamplerConfig),
        (OPTIMIZERS, OptimizerConfig),
    ],
    ids=["objectives", "environments", "tasks", "samplers", "optimizers"],
)
def test_registry_has_each_choice_of_the_settings(registry, union):
    assert set(registry) == set(get_args(union))


def test_engines_and_formats_are_those_of_the_settings():
    assert set(ENGINES) == {choice.__struct_config__.tag for choice in get_args(EngineConfig)}
    assert set(FORMATS) == set(get_args(FormatName))
