"""What `make mutants` changes, by hand, and that its table names files that are there."""

import pytest
from helpers.commands import stretched

from bench.common import ROOT
from bench.mutants import Tree, mutants_of, nearest_tests

SOURCE = b'''"""1 < 2"""
LIMIT: int | None = 3

@cached(size=4)
def f(x: int | None, most=5) -> int | None:
    """x > 1"""
    if not x or x >= most:
        raise ValueError(f"{x + 1} is over {most}")
    x += 2 * -x
    return min(x, 0.5) if x not in (True,) else 1  # x < 2
'''
CHANGED = [
    b"def f(x: int | None, most=6) -> int | None:",
    b"if x or x >= most:",
    b"if not x and x >= most:",
    b"if not x or x > most:",
    b"x -= 2 * -x",
    b"x += 2 / -x",
    b"x += 3 * -x",
    b"x += 2 * x",
    b"return max(x, 0.5) if x not in (True,) else 1  # x < 2",
    b"return min(x, 1.0) if x not in (True,) else 1  # x < 2",
    b"return min(x, 0.5) if x in (True,) else 1  # x < 2",
    b"return min(x, 0.5) if x not in (False,) else 1  # x < 2",
    b"return min(x, 0.5) if x not in (True,) else 2  # x < 2",
]


def test_operators_and_constants_change_but_not_texts_or_types():
    found = []
    for mutant in mutants_of("f.py", SOURCE):
        after, before = mutant.source(SOURCE).split(b"\n"), SOURCE.split(b"\n")
        [number] = [i for i, line in enumerate(before) if line != after[i]]
        assert mutant.line(SOURCE) == number + 1
        found.append(after[number].strip())
    assert sorted(found) == sorted(CHANGED)


def test_every_module_of_the_table_has_tests_that_exist():
    table = nearest_tests()
    assert len(table) > 40
    assert {
        test for tests in table.values() for test in tests if not (ROOT / test).exists()
    } == set()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_mutant_that_a_test_sees_is_killed_in_a_copy(tmp_path):
    """One of the two is equal in effect: versions begin at 0."""
    source = (ROOT / "learner/data/group_reader.py").read_bytes()
    mutants = mutants_of("learner/data/group_reader.py", source)
    [counted] = [m for m in mutants if b"self.duplicates -= 1" in m.source(source)]
    [newest] = [m for m in mutants if b"self._newest = -2" in m.source(source)]
    tree, tests = Tree(tmp_path), ["tests/data/test_group_reader.py"]
    assert tree.kills(counted, tests, stretched(120))
    assert not tree.kills(newest, tests, stretched(120))
    assert (tmp_path / "learner/data/group_reader.py").read_bytes() == source
