"""Kubernetes API objects and value types as typed structs; no I/O.

- `meta.py`: ObjectMeta, JSON field names, decoding and encoding.
- `pod.py`, `pod_status.py`, `volume.py`: pods; `core.py`: other core objects, RuntimeClass, tokens, events.
- `node.py`: Node and Lease; `storage.py`: CSI objects, PersistentVolume and PersistentVolumeClaim.
- `certificates.py`, `resource_claim.py`, `reviews.py`: CSRs; DRA; TokenReview and SubjectAccessReview.
- `selector.py`: label and node selectors; `names.py`: validation of names and sysctl patterns.
- `quantity.py`, `duration.py`, `cpuset.py`, `ip.py`: value types.
- `downward_api.py`: downward API values and `$(VAR)` expansion; `merge_patch.py`: strategic merge patches.
"""
