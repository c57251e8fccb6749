"""Images on the node: pull policies, pulls with their credentials and limits, access control, removal.

    images = ImageManager(cri.images, journal, tasks, limits=PullLimits(...), metrics=ImageMetrics(registry))
    image = await images.ensure(pod, container, sandbox_config)

- `image_manager.py`: the entry point: pull policies, back-off and events.
- `image_reference.py`: parser of image names.
- `puller.py`: status cache and deduplicated pulls, pull limits, and the waiting reasons of containers.
- `pull_manager.py`: access of pods to images that are present; `pull_records.py`: its records on disk.
- `credentials.py`: keyring, pull secrets and the node's credential files.
- `credential_provider.py`: exec plugins that provide registry credentials.
- `python_providers.py`: third-party code that provides them.
- `image_gc.py`: removal of unused images by disk usage and age, and for the eviction manager.
- `metrics.py`: metrics of pulls, pull records, credential providers and garbage collection.
"""
