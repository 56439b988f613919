"""Contestants that run in a process, and maybe in an environment, of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import ROOT, peer_env, say

OURS = Path(sys.executable)


def python_of(environment: str) -> Path:
    """Returns the interpreter that ENVIRONMENT_PYTHON names, by default that of .venv-ENVIRONMENT."""
    default = ROOT / f".venv-{environment}" / "bin" / "python"
    return Path(os.environ.get(f"{environment.upper()}_PYTHON", default))


@dataclass
class Peers:
    """What contestants say of themselves in a line of JSON, and why some said nothing."""

    found: dict[str, dict[str, Any]] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)

    def ask(self, name: str, python: Path, module: str, *args: str) -> None:
        """Runs a module of ours and keeps its answer, or the reason why it has none."""
        say(name)
        if not python.exists():
            self.left_out[name] = f"{python.parents[1].name} is not installed"
            return
        env = peer_env(1) | {"TRL_EXPERIMENTAL_SILENCE": "1", "PYTHONPATH": str(ROOT)}
        argv = [str(python), "-m", module, *args]
        done = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
        # vLLM logs to stdout, also after the answer.
        answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
        if done.returncode or not answers:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            self.left_out[name] = f"exit {done.returncode}: {last[:200]}"
            say(f"{name} is left out: {done.stderr[-3000:]}")
        else:
            self.found[name] = json.loads(answers[-1])

    def closing(self) -> str:
        """Returns a paragraph about who was left out, empty if nobody was."""
        lines = [f"{name} ({why})" for name, why in self.left_out.items()]
        return f"\n\nLeft out: {'; '.join(lines)}." if lines else ""
