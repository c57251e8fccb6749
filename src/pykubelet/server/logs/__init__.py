"""Logs of containers and of the node.

- `container_logs.py`: `/containerLogs`; `log_files.py`: reader of CRI log files; `log_chain.py`: the files
  of a log in order, also rotated ones.
- `node_logs.py`: `/logs/` and node log query.
"""
