"""The runtime's own statistics of pods and containers.

- `runtime_stats`: writable layers and image file systems; pods with `PodAndContainerStatsFromCRI`.
- `summary`: their pods in the Summary API; `metrics`: their metrics on `/metrics/cadvisor`.
"""
