"""Generic runtime manager: from a pod and its observed state to sandboxes and containers through CRI.

- `observe.py`: state of pods in the runtime; `decide.py`: pure computation of the actions for a pod.
- `configuration/`: sandbox and container configs of the pod.
- `start.py`: start of sandboxes and containers; `kill.py`: stop, with lifecycle hooks; `removal.py`: removal
  of exited containers; `resize.py`: in-place resize.
- `gc.py`: garbage collection of dead containers, sandboxes and logs; `log_rotation/`: rotation of logs.
- `labels.py`: labels and annotations of containers; `errors.py`: what can make a start fail.
- `paths.py`: pod directories and log paths; `pod_logs.py`: log directories and links.
- `metrics.py`: metrics of starts and hooks.
"""
