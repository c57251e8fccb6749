"""Metrics of the servers, and the endpoints of all metrics.

- `server_metrics.py`: counters of requests, `/metrics`, `/metrics/probes`, `/metrics/slis`.
- `stats_metrics.py`: `/metrics/cadvisor` and `/metrics/resource`; `registry_text.py`: text of a registry.
"""
