"""The alerts of docker/prometheus/alerts.yml as the Prometheus operator takes them: `make reference` writes
kubernetes/monitoring/rules.yaml, and a test compares them."""

from pathlib import Path

ALERTS = Path(__file__).parent.parent / "prometheus" / "alerts.yml"
HEAD = """\
# Made from docker/prometheus/alerts.yml by `make reference`.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: areal-q
  labels: { release: kube-prometheus-stack }
spec:
"""


def rules_file() -> str:
    """Returns the text of rules.yaml."""
    lines = ALERTS.read_text().splitlines()
    body = lines[lines.index("groups:") :]
    return HEAD + "".join(f"  {line}\n" for line in body)


if __name__ == "__main__":
    print(rules_file(), end="")
