"""What one training step goes through stays as small as a reader can take in."""

from dataclasses import fields

from bench.house import PRODUCT, STEP, concepts, length, modules
from learner.loop import Learner

STEPS = [module for folder in PRODUCT for module in modules(folder) if module.name in STEP]


def test_no_function_of_a_step_has_more_than_forty_lines():
    assert len(STEPS) == len(STEP)
    assert [f.name for module in STEPS for f in module.functions if length(f) > 40] == []


def test_a_step_has_few_helpers_that_one_place_calls():
    single = sum(len(module.single_use()) for module in STEPS)
    assert single / sum(module.lines().total() for module in STEPS) <= 7 / 1000


def test_a_learner_has_few_parts_and_a_step_few_classes():
    assert len(fields(Learner)) <= 20
    assert concepts([m for folder in PRODUCT for m in modules(folder)], STEP) <= 45
