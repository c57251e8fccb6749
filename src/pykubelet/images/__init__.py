"""Images on the node: pulling them, with which credentials, and how often.

    images = ImagePuller(cri.images, journal, tasks, limits=PullLimits(...), metrics=ImageMetrics(registry))
    image = await images.ensure(pod, container, sandbox_config)

- `images.py`: the door: pull policies, back-off and events.
- `names.py`: what an image's name says.
- `presence.py`: which images the runtime has; `pulls.py`: getting one that it has not.
- `shared.py`: one call for many who ask the same; `pull_limits.py`: how many pulls, how often.
- `pull_manager.py`: which pods may use an image that is present; `pull_records.py`: its records on disk.
- `keyring.py`: which credentials fit an image; `credentials.py`: pull secrets and the node's files.
- `pull_secrets.py`: the pull secrets that a pod names.
- `provider_config.py`, `provider_exec.py`, `provider_plugins.py`: programs that know credentials;
  `provider_accounts.py`: in whose name they are asked.
- `errors.py`: the reasons for which a container waits; `metrics.py`: the counts.
"""
