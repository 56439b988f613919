"""How strong the tests are: one operator or constant is changed, and the nearest tests run: `make mutants`.

    python -m bench.mutants --count 60 --seed 0 [--only learner/data/admission.py] [--jobs 2] [--line 82]

A mutant is killed when a test fails or takes five times as long as without it, and it survives when all tests
pass. bench/mutants.toml says which tests are nearest to a module. Each job works in a copy of the tree, so
nothing here is changed. What is left after a sample, and why: docs/mutants.md. Exit code 1 where less than 90 %
were killed.
"""

import argparse
import ast
import os
import queue
import random
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, say

TABLE = Path(__file__).with_suffix(".toml")
AIM = 0.9
COMPARISONS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One change of a file: `was` at byte `start` becomes `becomes`."""

    path: str
    start: int
    was: str
    becomes: str

    def source(self, source: bytes) -> bytes:
        end = self.start + len(self.was.encode())
        return source[: self.start] + self.becomes.encode() + source[end:]

    def line(self, source: bytes) -> int:
        return source.count(b"\n", 0, self.start) + 1

    def diff(self, source: bytes) -> str:
        """The line before and after. Example: "- return a < b\\n+ return a <= b"."""
        number = self.line(source) - 1
        texts = (source, self.source(source))
        before, after = (text.split(b"\n")[number].strip().decode() for text in texts)
        return f"  - {before}\n  + {after}"


class Finder(ast.NodeVisitor):
    """Collects the mutants of one file. Annotations, decorators and messages are left as they are, and so is
    what stands outside functions."""

    def __init__(self, path: str, source: bytes) -> None:
        self.found: list[Mutant] = []
        self._path, self._source, self._depth = path, source, 0
        lengths = [len(line) + 1 for line in source.split(b"\n")]
        self._line_starts = [0]
        for length in lengths:
            self._line_starts.append(self._line_starts[-1] + length)
        self.visit(ast.parse(source))

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._depth += 1
        for default in (*node.args.defaults, *node.args.kw_defaults):
            if default:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._depth -= 1

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value:
            self.visit(node.value)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leaves messages as they are."""

    def visit_Compare(self, node: ast.Compare) -> None:
        sides = [node.left, *node.comparators]
        for left, operator, right in zip(sides, node.ops, sides[1:], strict=False):
            self._between(left, right, *COMPARISONS[type(operator)])
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if type(node.op) in ARITHMETIC and (self._depth or not isinstance(node.op, ast.BitOr)):
            self._between(node.left, node.right, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if type(node.op) in ARITHMETIC:
            self._between(node.target, node.value, *ARITHMETIC[type(node.op)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        words = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self._between(left, right, *words)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        was = {ast.Not: "not ", ast.USub: "-"}.get(type(node.op))
        if was:
            self._add(self._start(node), was, "")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Name) and node.func.id in NAMES:
            self._add(self._start(node.func), node.func.id, NAMES[node.func.id])
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not self._depth or not isinstance(node.value, bool | int | float):
            return
        start = self._start(node)
        was = self._source[start : self._end(node)].decode()
        if isinstance(node.value, float):
            becomes = repr(node.value * 2 if node.value else 1.0)
        else:
            becomes = repr(not node.value if isinstance(node.value, bool) else node.value + 1)
        self._add(start, was, becomes)

    def _between(self, left: ast.expr, right: ast.expr, was: str, becomes: str) -> None:
        """The operator is the last text between its sides that is not a comment."""
        start, end = self._end(left), self._start(right)
        at = self._source[start:end].find(was.encode())
        if at >= 0 and self._depth:
            self._add(start + at, was, becomes)

    def _add(self, start: int, was: str, becomes: str) -> None:
        if self._source[start:].startswith(was.encode()):
            self.found.append(Mutant(self._path, start, was, becomes))

    def _start(self, node: ast.expr) -> int:
        return self._line_starts[node.lineno - 1] + node.col_offset

    def _end(self, node: ast.expr) -> int:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self._line_starts[node.end_lineno - 1] + node.end_col_offset


def mutants_of(path: str, source: bytes) -> list[Mutant]:
    """Every mutant of the file that is still Python."""
    return [m for m in Finder(path, source).found if parses(m.source(source))]


def parses(source: bytes) -> bool:
    try:
        ast.parse(source)
    except SyntaxError:
        return False
    return True


def nearest_tests() -> dict[str, list[str]]:
    """Test files by module. A module may be a pattern, "areal_q/algorithms/*.py"; the last that fits holds."""
    tests: dict[str, list[str]] = {}
    for pattern, files in tomllib.loads(TABLE.read_text())["tests"].items():
        paths = sorted(path for path in ROOT.glob(pattern) if path.name != "__init__.py")
        if not paths:
            raise SystemExit(f"{TABLE.name}: no file is {pattern}")
        for path in paths:
            tests[str(path.relative_to(ROOT))] = files
    return {path: files for path, files in tests.items() if files}


class Tree:
    """A copy of the working tree in which files are changed and tests run."""

    def __init__(self, place: Path) -> None:
        self._place = place
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
            if name and (ROOT / name).is_file():
                (place / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, place / name)
        (place / ".venv").symlink_to(Path(sys.prefix))

    def seconds(self, tests: list[str]) -> float:
        """How long the tests take as they are. Exits where they do not pass."""
        start = time.monotonic()
        result = self._run(tests, 1800)
        if result is None or result.returncode:
            said = result.stdout[-3000:] if result else "no end in half an hour"
            raise SystemExit(f"without a change, {' '.join(tests)} fail:\n{said}")
        return time.monotonic() - start

    def kills(self, mutant: Mutant, tests: list[str], timeout: float) -> bool:
        """Tells if a test sees the change."""
        path = self._place / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.source(source))
        try:
            result = self._run(tests, timeout)
        finally:
            path.write_bytes(source)
        return result is None or result.returncode != 0

    def _run(self, tests: list[str], timeout: float) -> subprocess.CompletedProcess[str] | None:
        """None where it took too long."""
        marks = "not slow and not peers and not pages"
        options = ["-x", "-q", "-m", marks, "-p", "no:cacheprovider"]
        with subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, *tests],
            cwd=self._place,
            # No .pyc: one of a mutant would stand in for the next of the same size and second.
            env=os.environ
            | {
                "PYTHONPATH": str(self._place),
                "PYTHONDONTWRITEBYTECODE": "1",
                "OMP_NUM_THREADS": "1",
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=timeout)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.communicate()
                return None
        return subprocess.CompletedProcess(process.args, process.returncode, said)


def try_all(
    mutants: list[Mutant], tests: dict[str, list[str]], jobs: int
) -> Iterator[tuple[Mutant, bool]]:
    """Tells of each whether it is killed, in the order of the list."""
    with tempfile.TemporaryDirectory(prefix="aq-mutants-") as directory:
        trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
        for job in range(jobs):
            trees.put(Tree(Path(directory) / str(job)))
        seconds: dict[tuple[str, ...], float] = {}

        def measure(files: tuple[str, ...]) -> None:
            tree = trees.get()
            seconds[files] = tree.seconds(list(files))
            trees.put(tree)

        def attempt(mutant: Mutant) -> bool:
            tree, files = trees.get(), tests[mutant.path]
            try:
                return tree.kills(mutant, files, 30 + 5 * seconds[tuple(files)])
            finally:
                trees.put(tree)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(measure, {tuple(tests[m.path]) for m in mutants}))
            say(f"the tests pass without a change: {sum(seconds.values()):.0f} s")
            yield from zip(mutants, pool.map(attempt, mutants), strict=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=60, help="how many to try; 0: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="files whose path contains this")
    parser.add_argument("--line", type=int, help="of the file, as --only names it")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    tests = {path: files for path, files in nearest_tests().items() if options.only in path}
    sources = {path: (ROOT / path).read_bytes() for path in tests}
    mutants = [m for path, source in sources.items() for m in mutants_of(path, source)]
    if options.line:
        mutants = [m for m in mutants if m.line(sources[m.path]) == options.line]
    if not mutants:
        raise SystemExit("no such mutant")
    say(f"{len(mutants)} mutants of {len(tests)} files")
    if 0 < options.count < len(mutants):
        mutants = random.Random(options.seed).sample(mutants, options.count)
    killed = 0
    for mutant, dead in try_all(mutants, tests, options.jobs):
        killed += dead
        source = sources[mutant.path]
        print(f"{'killed  ' if dead else 'SURVIVED'} {mutant.path}:{mutant.line(source)}")
        print(mutant.diff(source), flush=True)
    print(f"{killed} of {len(mutants)} mutants were killed: {killed / len(mutants):.0%}")
    sys.exit(killed < AIM * len(mutants))


if __name__ == "__main__":
    main()
