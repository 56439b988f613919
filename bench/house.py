"""Counts of the tree, for those who want it smaller: `python -m bench.house` prints them as Markdown tables.

Lines of each package by kind; functions, and how many private ones have one caller; public names that more than
one module defines; classes that a reader of a step, or of a version's way, meets; files that spell a metric's
name; entry points of commands; words of the README.
"""

import ast
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

from areal_q.config.objectives import AdvantageConfig, AggregationConfig, ObjectiveConfig

ROOT = Path(__file__).parent.parent
PRODUCT = ("areal_q", "buffer", "rollout", "learner")
KINDS = ("code", "docstrings", "imports", "blank", "comments")
METRIC = "mismatch/kl"
STEP = (
    "learner/train_step.py", "learner/policy_update.py", "learner/policy_advantages.py",
    "learner/data/packing.py", "learner/data/staleness.py", "learner/backends/base.py",
    "learner/backends/single_device.py", "areal_q/algorithms/loss.py", "areal_q/algorithms/loss_types.py",
    "areal_q/algorithms/advantages.py", "areal_q/algorithms/policy_losses.py",
)  # fmt: skip
"""The files that one training step on one device goes through"""
VERSION = (
    "learner/publishing/weight_publisher.py", "learner/publishing/version_builder.py",
    "areal_q/models/low_bit/published_state.py", "areal_q/weights/version.py", "areal_q/weights/delta.py",
    "areal_q/weights/delta_codec.py", "areal_q/messages/weight_sync.py", "buffer/weight_sync/server.py",
    "buffer/weight_sync/version_store.py", "buffer/weight_sync/request_handler.py",
    "buffer/weight_sync/subscriber.py", "buffer/weight_sync/fetcher.py", "buffer/weight_sync/latest.py",
    "rollout/worker.py", "rollout/engines/reference/async_engine.py",
)  # fmt: skip
"""Those on the way of a version of the weights from the learner to our own engine (docs/architecture.md)"""
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Module:
    """One Python file, parsed."""

    def __init__(self, path: Path) -> None:
        self.name = str(path.relative_to(ROOT))
        self.text = path.read_text("utf-8")
        self.tree = ast.parse(self.text)
        self.functions = [n for n in ast.walk(self.tree) if isinstance(n, Function)]

    def lines(self) -> Counter[str]:
        """Returns the number of lines of each of KINDS."""
        kind = ["code"] * len(self.text.splitlines())
        for number, line in enumerate(self.text.splitlines()):
            bare = line.strip()
            kind[number] = "blank" if not bare else "comments" if bare[0] == "#" else "code"
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._mark(kind, node, "imports")
            elif isinstance(node, ast.Expr) and _is_text(node.value):
                self._mark(kind, node, "docstrings")
        return Counter(kind)

    def _mark(self, kind: list[str], node: ast.stmt, name: str) -> None:
        first, last = node.lineno - 1, node.end_lineno or node.lineno
        kind[first:last] = [name] * (last - first)

    def public_names(self) -> Iterator[str]:
        """Yields the functions, classes and constants that the module defines for others."""
        for node in self.tree.body:
            if isinstance(node, Function | ast.ClassDef):
                names = [node.name]
            elif isinstance(node, ast.Assign):
                names = [t.id for t in node.targets if isinstance(t, ast.Name)]
            else:
                names = []
            yield from (name for name in names if not name.startswith("_") and name != "logger")

    def single_use(self) -> list[str]:
        """Returns the private functions that the module names once beside their definition."""
        private = {f.name for f in self.functions if re.match(r"_[a-z]", f.name)}
        used = Counter(
            node.id if isinstance(node, ast.Name) else node.attr
            for node in ast.walk(self.tree)
            if isinstance(node, ast.Name | ast.Attribute)
        )
        return [name for name in sorted(private) if used[name] == 1]

    def classes(self) -> set[str]:
        """Returns the public classes that the module defines."""
        found = (node.name for node in self.tree.body if isinstance(node, ast.ClassDef))
        return {name for name in found if not name.startswith("_")}

    def names(self) -> set[str]:
        """Returns the names that the module's code uses, beside those of attributes."""
        return {node.id for node in ast.walk(self.tree) if isinstance(node, ast.Name)}


def concepts(product: list[Module], files: Sequence[str]) -> int:
    """Returns the number of classes of ours that `files` define or name. Of objectives, advantages and
    aggregations a run has one each, so that each of these choices counts as one."""
    classes = {name for module in product for name in module.classes()}
    read = [module for module in product if module.name in files]
    met = {name for module in read for name in module.names() | module.classes()} & classes
    for choice in (ObjectiveConfig, AdvantageConfig, AggregationConfig):
        options = {option.__name__ for option in get_args(choice)} & met
        met -= options - {min(options, default="")}
    return len(met)


def modules(folder: str) -> list[Module]:
    return [Module(path) for path in sorted((ROOT / folder).rglob("*.py"))]


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def length(function: Function) -> int:
    return (function.end_lineno or function.lineno) - function.lineno + 1


def _row(cells: Iterable[object]) -> str:
    return f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in cells)} |"


def _size_rows(found: dict[str, list[Module]]) -> Iterator[list[object]]:
    for folder, members in found.items():
        lines = sum((module.lines() for module in members), Counter[str]())
        yield [folder, len(members), lines.total(), *(lines[kind] for kind in KINDS)]


def _figures(product: list[Module]) -> Iterator[tuple[str, object]]:
    lengths = sorted(length(f) for module in product for f in module.functions)
    names = Counter(name for module in product for name in set(module.public_names()))
    entries = sum('if __name__ == "__main__"' in module.text for module in product)
    yield (
        "functions; median, longest lines",
        f"{len(lengths):,}; {statistics.median(lengths):g}, {lengths[-1]}",
    )
    step = [module for module in product if module.name in STEP]
    for where, some in (("", product), (" of a step's files", step)):
        single, of = sum(len(m.single_use()) for m in some), sum(m.lines().total() for m in some)
        yield (
            f"private functions with one caller, per 1,000 lines{where}",
            f"{single / of * 1000:.1f}",
        )
    yield "public names in more than one module", sum(count > 1 for count in names.values())
    yield "classes that a reader of one step meets", concepts(product, STEP)
    yield "classes that a reader of a version's way meets", concepts(product, VERSION)
    yield "modules over 300 lines", sum(m.lines().total() > 300 for m in product)
    yield f"files that spell {METRIC!r}", sum(f'"{METRIC}' in m.text for m in product)
    yield "entry points of commands", entries
    yield "words of the README", len((ROOT / "README.md").read_text("utf-8").split())


def main() -> None:
    found = {folder: modules(folder) for folder in (*PRODUCT, "tests", "bench")}
    product = [module for folder in PRODUCT for module in found[folder]]
    print(_row(["", "files", "lines", *KINDS]), _row(["---"] * (3 + len(KINDS))), sep="\n")
    for row in _size_rows({**found, "product": product}):
        print(_row(row))
    print("\n" + _row(["product", ""]), _row(["---", "---"]), sep="\n")
    for figure in _figures(product):
        print(_row(figure))


if __name__ == "__main__":
    main()
