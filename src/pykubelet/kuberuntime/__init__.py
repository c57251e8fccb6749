"""Generic runtime manager: from a pod and its observed state to sandboxes and containers through CRI.

- `observe.py`: state of pods in the runtime; `decide.py`: pure computation of the actions for a pod.
- `config.py`: sandbox and container configs, built from `options.py` (their inputs), `env.py`, `dns.py`,
  `mounts.py`, `security.py`, `linux_resources.py` and `labels.py`; `errors.py`: what can make them fail;
  `config_builder.py`: gathers the inputs.
- `start.py`: start of sandboxes and containers; `container_images.py`: their images; `kill.py`: stop, with
  lifecycle hooks; `removal.py`: removal of exited containers; `resize.py`: in-place resize.
- `gc.py`: garbage collection of dead containers, sandboxes and logs.
- `paths.py`: pod directories and log paths; `pod_logs.py`: log directories and links;
  `user_namespaces.py`: ID ranges of pods.
- `metrics.py`: metrics of starts and hooks.
"""
