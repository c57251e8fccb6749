"""Volume plugins other than CSI, one module per volume type.

- `config_map.py`, `secret.py`, `downward_api.py`, `projected.py`: files that the kubelet writes.
- `empty_dir.py`, `host_path.py`, `local.py`: storage of the node.
- `nfs.py`: exports of an NFS server.
- `iscsi.py`, `fc.py`: network disks, based on `network_disk.py`.
- `flex.py`: FlexVolume drivers.
- `image.py`: images mounted by the container runtime, and the volume types that are not supported.
"""
