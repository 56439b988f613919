"""`python -m areal_q.observability.health PORT`: whether the service whose metrics are on that port is well.

Exit codes: 0 well; 1 it does not answer, or a worker's last heartbeat is older than MAX_AGE_S (one line).
A learner records once a step, which may take long: of it, only the answer counts.
"""

import re
import sys
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

from areal_q.observability.prometheus_exporter import HEALTH_AGENT, PREFIX

MAX_AGE_S = 30.0
_BEAT = re.compile(rf"^{PREFIX}worker_record_timestamp_seconds\{{.*\}} (\S+)$", re.MULTILINE)


def complaint(port: int, now_s: float) -> str | None:
    """Returns what is wrong, or None. `now_s` is Unix time."""
    request = Request(f"http://127.0.0.1:{port}/metrics", headers={"User-Agent": HEALTH_AGENT})
    try:
        with urlopen(request, timeout=5) as page:
            beat = _BEAT.search(page.read().decode())
    except (URLError, TimeoutError) as error:
        return f"no metrics on port {port}: {error}"
    if beat and now_s - float(beat[1]) > MAX_AGE_S:
        return f"the last heartbeat is {now_s - float(beat[1]):.0f} s old"
    return None


if __name__ == "__main__":
    found = complaint(int(sys.argv[1]), time.time())
    if found:
        print(found, file=sys.stderr)
    sys.exit(1 if found else 0)
