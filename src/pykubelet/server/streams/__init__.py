"""Streams into containers: exec, attach and port-forward.

- `streaming.py`: the endpoints; `proxy.py`: tunnel to the runtime; `translator.py`: WebSocket to SPDY.
- `container_actions.py`: `/run`, `/checkpoint`, `/runningpods`.
"""
