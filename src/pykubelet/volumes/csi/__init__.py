"""CSI volumes: the node side, which calls the gRPC Node service of the CSI drivers registered on the node.

- `plugin.py`: `CsiPlugin`, the volume plugin; builds everything below and runs its background tasks.
- `mounter.py`, `block_mapper.py`: stage and publish, and the reverse, of file system and block volumes.
- `dependencies.py`: collaborators and helpers that these two share.
- `unpublish.py`, `pending_unpublish.py`: unpublish without a driver, and the calls that are still to be made.
- `expansion.py`: NodeExpandVolume and the status of the PVC.
- `drivers.py`: registered drivers, the CSIDriver informer, and pods that wait for either.
- `csinode.py`: CSINode, node annotation and labels, volume limits.
- `volume_attachments.py`: waiting until a volume is attached.
- `request_context.py`: secrets, pod information and tokens in requests.
- `node_client.py`: the gRPC client.
- `volume.py`, `names.py`, `paths.py`: a volume, its names, its paths and `vol_data.json`.
- `translation.py`: in-tree volumes as CSI volumes (CSI migration).
"""
