"""Readers of cgroup v1 and v2.

- `readers`: chooses the reader; `v1`, `v2`: the readers.
- `files`: open files of cgroups, their budget, parsing; `host`: facts that both readers share.
"""
