"""Devices, disks, labels and sub-paths of mounted volumes.

- `mount_helper`: `mount`, `umount` and other host binaries.
- `block`: block devices; `disks`: formatting and mounting of disks.
- `selinux`: labels of mounts; `sub_path`: sub-paths of volumes.
"""
