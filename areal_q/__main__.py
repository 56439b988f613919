"""`python -m areal_q`: the same as `areal-q`, which begins here."""

import os
import signal
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


def main() -> None:
    """Runs the command. While it is being imported, for about a second, Ctrl-C ends it without a word."""
    before = signal.getsignal(signal.SIGINT)
    # A script's command in the background ignores it.
    usual = before is signal.default_int_handler
    if usual:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from areal_q.cli import app

    if usual:
        signal.signal(signal.SIGINT, before)
    app.main()


if __name__ == "__main__":
    _forget_current_directory()
    main()
