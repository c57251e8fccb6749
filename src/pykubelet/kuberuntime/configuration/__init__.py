"""CRI configs of sandboxes and containers.

- `config_builder.py`: gathers the inputs for a pod, and builds its configs.
- `cri_configs.py`: the configs, built from `options.py` (their inputs), `env.py`, `dns.py`, `mounts.py`,
  `security.py` and `linux_resources.py`.
- `container_images.py`: images that a container needs; `user_namespaces.py`: ID ranges of pods.
"""
