"""Access to the Linux host: cgroups, mounts, /proc, /sys, netfilter, systemd.

- `cgroupfs.py`: detection of cgroup v1 and v2; members and removal of a cgroup tree.
- `dbus.py`, `systemd.py`: D-Bus client; transient units, sd_notify and the watchdog.
- `logind.py`: delay inhibitors, PrepareForShutdown and the longest delay.
- `hardware.py`, `host_info.py`: cAdvisor's MachineInfo; machine id, kernel, OS image, clock, boot time.
- `inotify.py`, `lock_file.py`: file change events; `--lock-file`.
- `iptables.py`, `network.py`: chains and rules; interfaces, routes, node IP, node name.
- `kernel.py`: kernel features, sysctls, swap, tmpfs `noswap`, SELinux.
- `loop_devices.py`, `mounts.py`: loop devices; mount table, unmounting, mount propagation.
- `oom_watcher.py`: OOM kills in /dev/kmsg.
- `port_owner.py`, `processes.py`, `process_limits.py`: listening sockets; processes; capabilities, rlimits,
  OOM score.
- `untrusted_files.py`: walking, removing and reading files that containers control.
"""


class HostError(Exception):
    """Raised when the host does not meet a requirement; the message is one line with cause and remedy."""
