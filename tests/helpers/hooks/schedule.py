"""Which tests `pytest -n 2` runs in one process: those of a file whose fixtures are made once for it.

pytest-xdist 3.8 has groups of its own, by a mark that it adds to a test's id; pytest 9.2 passes over that, so
that each process made such a fixture again, a whole run at times.
"""

from functools import cache
from pathlib import Path
from typing import Any

import pytest


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getoption("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if has_module_fixture(config.rootpath / file) else nodeid

    return ByFile(config, log)


@cache
def has_module_fixture(path: Path) -> bool:
    """Returns whether a fixture of this file is made once for all its tests."""
    return 'scope="module"' in path.read_text()
