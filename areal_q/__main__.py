"""`python -m areal_q`: the same as `areal-q`."""

import os
import sys
from pathlib import Path


def _forget_current_directory() -> None:
    """Does what `python -P -m` would: no file of the current directory takes a module's place. A clone that is
    not installed must stay on the path, of the children too."""
    if sys.flags.safe_path:
        return
    clone = Path(__file__).resolve().parents[1]
    if Path.cwd() == clone:
        paths = [str(clone), os.environ.get("PYTHONPATH", "")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    else:
        sys.path.pop(0)


if __name__ == "__main__":
    _forget_current_directory()
    from areal_q.cli.app import main

    main()
