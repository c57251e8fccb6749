"""Rotation of container logs: names and plans, operations on log directories, the manager.

plan        names of rotated files; what to remove, to compress and when to check a log next; pure
directory   rename, compress, trim and remove in one open directory, without following symbolic links
readers     clients that follow a log, whose unread rotated files are retained for a while
manager     ContainerLogManager: checks sizes, rotates, compresses, recovers
"""
