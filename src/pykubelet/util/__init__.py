"""Helpers without knowledge of Kubernetes.

- `backoff.py`: exponential back-off, and rate-limited error logging.
- `entry_points.py`: installed Python entry points.
- `metrics.py`: Prometheus helpers.
- `rate_limiter.py`: token bucket.
- `singleflight.py`: one call for concurrent callers with the same key.
- `tasks.py`: task scopes, and blocking work in threads.
- `text.py`: quoting of untrusted text, FNV-1a hash.
- `third_party.py`: loading and calls of third-party code, bounded in time and in number.
"""
