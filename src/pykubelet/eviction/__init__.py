"""Eviction: reclaims memory, disk space, inodes and process IDs of a node that is short of them.

signals        eviction signals and thresholds; which disks nodefs, imagefs and containerfs share
observations   measured amounts of the signals, and the usage of pods
decide         thresholds met, node conditions, the threshold to act on; pure
ranking        order in which pods are evicted, messages of evicted pods; pure
local_storage  limits on ephemeral storage and emptyDir volumes; pure
memory_notifier  notification by the kernel that memory runs short
manager        `EvictionManager`, which acts on the decisions
admission      rejection of pods while the node is under pressure
report         state of all signals, for `pykubelet pressure`
"""
