"""Records and views of a run: metrics, Prometheus, service logs, summaries."""
