"""Flags of the command line.

- `parser`: the parser; `flag`: flag types; `flag_table`: all flags.
- `kubelet_flags`: settings that exist only as flags.
- `removed_flags`: flags of old versions that are rejected.
"""
