"""Linux as the agent sees it: cgroups, mounts, /proc, sockets to systemd; the only room that touches the machine directly."""
