"""`python -m areal_q.observability.health PORT` checks the health of the service that serves metrics on PORT.

Exit code 0: the service is healthy. Exit code 1: it does not answer, its worker's last heartbeat is older than
MAX_AGE_S, or it has made no progress for longer than a limit that follows its usual pace
(areal_q/system/watchdog.py). One line on stderr says which.
"""

import http.client
import re
import sys
import time
from urllib.request import Request

from areal_q.observability.prometheus_exporter import (
    HEALTH_AGENT,
    PREFIX,
    PROGRESS_AGE,
    PROGRESS_LIMIT,
)
from areal_q.system.local_requests import open_url

MAX_AGE_S = 30.0
"""Age in seconds beyond which a worker's last heartbeat means that the worker is not healthy."""


def complaint(port: int, now_s: float) -> str | None:
    """Returns what is wrong with the service at `port`, or None. `now_s` is Unix time in seconds."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"User-Agent": HEALTH_AGENT})
    try:
        with open_url(request, 5.0) as page:
            text = page.read().decode()
    except (OSError, http.client.HTTPException) as error:
        return f"no metrics on port {port}: {error}"
    beat = _value(text, "worker_record_timestamp_seconds")
    if beat is not None and now_s - beat > MAX_AGE_S:
        return f"the last heartbeat is {now_s - beat:.0f} s old"
    age_s, limit_s = _value(text, PROGRESS_AGE), _value(text, PROGRESS_LIMIT)
    if age_s is not None and limit_s is not None and age_s > limit_s:
        return f"stuck: no progress for {age_s:.0f} s, more than {limit_s:.0f} s"
    return None


def _value(metrics: str, name: str) -> float | None:
    found = re.search(rf"^{PREFIX}{name}\{{.*\}} (\S+)$", metrics, re.MULTILINE)
    return float(found[1]) if found else None


if __name__ == "__main__":
    found = complaint(int(sys.argv[1]), time.time())
    if found:
        print(found, file=sys.stderr)
    sys.exit(1 if found else 0)
