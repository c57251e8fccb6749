"""Desired pods: their sources, defaults and validation, and the changes between updates.

Modules:

    api_source.py           pods bound to this node, from the API server; CheckpointSource
    file_source.py          static pods from `staticPodPath`, watched by inotify
    url_source.py           static pods from `staticPodURL`
    static_sources.py       start of the configured static pod sources
    mux.py                  PodMux: sets of all sources to pod changes; PodStore: lookup of desired pods
    manifests.py            decoding of manifests
    local_objects.py        ConfigMaps and Secrets in manifests, and their PodObjects
    static_pods.py          identity of static pods, pod origin, installation of manifests
    ephemeral_containers.py ephemeral containers of `pykubelet debug`
    defaults.py             API defaults for static pods
    validate.py             validation of a pod
    validate_container.py   validation of containers, probes, resources and security contexts
    checkpoints.py          pods and their objects on disk (`--pod-checkpoint-dir`)
    pod_history.py          events and timeline per pod
"""
