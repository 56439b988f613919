"""`python -m areal_q.observability.health PORT`: whether the service whose metrics are on that port is well.

Exit codes: 0 well; 1 it does not answer, a worker's last heartbeat is older than MAX_AGE_S, or a learner has
neither ended a step nor waited for groups for STEP_S and for STEPS times its last step (one line).
"""

import re
import sys
import time
from urllib.request import Request, urlopen

from areal_q.observability.prometheus_exporter import HEALTH_AGENT, PREFIX

MAX_AGE_S = 30.0
STEP_S, STEPS = 1800.0, 10.0
"""How long a step may take, at least; a first one compiles, a last one is followed by a checkpoint."""


def complaint(port: int, now_s: float) -> str | None:
    """Returns what is wrong, or None. `now_s` is Unix time."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"User-Agent": HEALTH_AGENT})
    try:
        with urlopen(request, timeout=5) as page:
            text = page.read().decode()
    except (OSError, TimeoutError) as error:
        return f"no metrics on port {port}: {error}"
    return _worker_complaint(text, now_s) or _learner_complaint(text, now_s)


def _worker_complaint(metrics: str, now_s: float) -> str | None:
    beat = _value(metrics, "worker_record_timestamp_seconds")
    if beat is not None and now_s - beat > MAX_AGE_S:
        return f"the last heartbeat is {now_s - beat:.0f} s old"
    return None


def _learner_complaint(metrics: str, now_s: float) -> str | None:
    step_s = _value(metrics, "learner_step_seconds")
    if step_s is None:  # before its first step
        return None
    names = ("learner_record_timestamp_seconds", "learner_waiting_timestamp_seconds")
    silent_s = now_s - max(_value(metrics, name) or 0.0 for name in names)
    if silent_s > max(STEP_S, STEPS * step_s):
        return f"no step ended in {silent_s:.0f} s, and it waits for no groups; the last took {step_s:.1f} s"
    return None


def _value(metrics: str, name: str) -> float | None:
    found = re.search(rf"^{PREFIX}{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else None


if __name__ == "__main__":
    found = complaint(int(sys.argv[1]), time.time())
    if found:
        print(found, file=sys.stderr)
    sys.exit(1 if found else 0)
