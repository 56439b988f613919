"""`areal-q init NAME` writes two files to begin with: settings, and code of the user's own.

The templates are configs/templates/TEMPLATE.toml and .py, in which NAME stands for the run's name.
"""

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
    for path in files.values():
        if path.exists():
            raise ConfigError(f"{path}: is there already; choose another NAME")
    with os_errors_as(ConfigError):
        name.parent.mkdir(parents=True, exist_ok=True)
        for end, path in files.items():
            text = (shipped() / TEMPLATES / f"{template}.{end}").read_text("utf-8")
            for other, place in files.items():
                text = text.replace(f"NAME.{other}", place.as_posix())
            with path.open("x", encoding="utf-8") as file:
                file.write(text.replace("NAME", name.name))
    typer.echo(f"{files['toml']} and {files['py']}: {MEANINGS[template]}")
    typer.echo(f"\nareal-q check {files['toml']}\nareal-q run {files['toml']}")
