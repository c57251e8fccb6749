"""File systems of the node, and ephemeral storage of pods.

- `filesystems`: nodefs, imagefs, containerfs; `mounted_filesystems`: the mount table.
- `pod_storage`: logs, `/etc/hosts` and volumes of pods; `metrics`: the metrics of it.
"""
