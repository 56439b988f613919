"""`python .ci/commit_subject.py FILE`: exit 1 unless the commit message in FILE begins with a subject like
`area: imperative summary`, of at most 72 characters, and a blank line before the body."""

import re
import sys
from pathlib import Path

LONGEST = 72
SUBJECT = re.compile(r"[A-Za-z][\w.' /-]*(, [A-Za-z][\w.' /-]*)*: \S.*[^.\s]")
WRITTEN_BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def fault(message: str) -> str:
    """Returns what is wrong with a commit message, "" if nothing is."""
    lines = [line for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(WRITTEN_BY_GIT):
        return ""
    if len(subject) > LONGEST:
        return f"the subject has {len(subject)} characters, {LONGEST} are allowed: {subject}"
    if not SUBJECT.fullmatch(subject):
        return f"the subject is not like `learner: skip empty groups`, with no dot at its end: {subject}"
    if lines[1:] and lines[1]:
        return f"no blank line between the subject and the body: {lines[1]}"
    return ""


if __name__ == "__main__":
    if found := fault(Path(sys.argv[1]).read_text("utf-8")):
        sys.exit(f"commit message: {found}")
