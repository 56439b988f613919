"""`areal-q init NAME` writes two files to begin with: settings, and code of the user's own.

The templates are configs/templates/TEMPLATE.toml and .py, in which NAME stands for the run's name.
"""

import json
import re
from pathlib import Path
from typing import Annotated

import typer

from areal_q.config import load
from areal_q.config.load import TEMPLATES, shipped
from areal_q.errors import ConfigError, os_errors_as

MEANINGS = {
    "text": "text in, text out: puts digits in order",
    "math": "a number for an answer: sums, written last digit first",
    "agent": "several turns: the model learns to call a calculator and to use what it says",
}
"""What each template learns."""


def main(
    name: Annotated[
        Path, typer.Argument(metavar="NAME", help="of the run and of its files, such as sums")
    ],
    template: Annotated[str, typer.Option(help=f"one of {', '.join(MEANINGS)}")] = "text",
) -> None:
    """Write NAME.toml and NAME.py to begin with: a task that is learnt within two minutes.

    Nothing is overwritten.
    """
    if template not in MEANINGS:
        raise ConfigError(f"--template {template}: none of {', '.join(MEANINGS)}")
    load(None, [("name", name.name)])
    # Not with_suffix, which would cut "v1.2" short.
    files = {end: name.with_name(f"{name.name}.{end}") for end in ("toml", "py")}
    told = {"NAME": name.name}
    # TOML escapes what a text may not hold as JSON does.
    told |= {
        f"NAME.{end}": json.dumps(path.as_posix(), ensure_ascii=False)[1:-1]
        for end, path in files.items()
    }
    for path in files.values():
        if path.exists():
            raise ConfigError(f"{path}: is there already; choose another NAME")
    with os_errors_as(ConfigError):
        name.parent.mkdir(parents=True, exist_ok=True)
        for end, path in files.items():
            text = (shipped() / TEMPLATES / f"{template}.{end}").read_text("utf-8")
            with path.open("x", encoding="utf-8") as file:
                file.write(re.sub(r"NAME(\.toml|\.py)?", lambda found: told[found[0]], text))
    typer.echo(f"{files['toml']} and {files['py']}: {MEANINGS[template]}")
    typer.echo(f"\nareal-q check {files['toml']}\nareal-q run {files['toml']}")
