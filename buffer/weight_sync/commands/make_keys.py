"""`areal-q keys DIR` makes CURVE keys that encrypt the weights on the wire and say who may fetch them."""

from pathlib import Path
from typing import Annotated

import typer

from buffer.weight_sync.curve import make_keys


def main(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="where to keep them")],
    client: Annotated[str, typer.Option(help="whose; one more each time")] = "worker",
) -> None:
    """Make CURVE keys that encrypt the weights on the wire and say who may fetch them."""
    for path in make_keys(directory, client):
        typer.echo(f"secret, keep it where it is used: {path}")
    typer.echo(f"broadcast.keys={directory}")
