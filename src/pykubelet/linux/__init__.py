"""Linux as the agent sees it: cgroups, mounts, /proc, sockets to systemd.

The only room that touches the machine directly.
"""


class HostError(Exception):
    """The machine is not as it has to be: one line with the cause and a remedy."""
