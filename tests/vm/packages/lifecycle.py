"""Life of the Debian package on a clean Debian with systemd; runs in the guest, on its own Python.

`lifecycle.py OLD.deb NEW.deb`: install, start, run a pod, upgrade, crash, remove, purge. Prints each
step; exits with 1 and the reason at the first difference from what is expected.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

DATA_DIR = Path("/var/lib/pykubelet")
SOCKET = DATA_DIR / "containerd/containerd.sock"
SLOW = 600.0
"""Seconds that anything may take in an emulated machine."""
POD = """\
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: default}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: main
    image: pykubelet.local/busybox:1
    command: [sh, -c, "echo hello >/data/index.html; exec httpd -f -p 8080 -h /data"]
    ports: [{containerPort: 8080, hostPort: 8080}]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes:
  - name: data
    emptyDir: {medium: Memory}
"""
_APT = ["apt-get", "-qq", "-y", "--no-install-recommends", "-o", "Dpkg::Use-Pty=0"]
# What the package manager, systemd and the clock write at any time.
_VOLATILE = (
    "/var/lib/dpkg",
    "/var/lib/apt",
    "/var/log",
    "/var/cache",
    "/var/lib/systemd/timers",
    "/var/lib/systemd/random-seed",
    "/etc/ld.so.cache",
    "/root",
    "/usr/lib/python3",
)


def main(old: str, new: str) -> None:
    """Run all steps."""
    before = state()
    assert not [line for line in before if "kubelet" in line], sorted(before)
    step("install")
    run(*_APT, "install", old)
    assert unit("kubelet", "is-enabled") == "enabled"
    assert unit("kubelet", "is-active") == "inactive", "kubelet.service starts without a kubeconfig"
    assert unit("pykubelet", "is-enabled") == "disabled"
    assert unit("pykubelet", "is-active") == "inactive"
    print(run("pykubelet", "version").strip())

    step("start")
    started_at = time.monotonic()
    run("systemctl", "start", "pykubelet")
    print(f"ready after {time.monotonic() - started_at:.0f} s")
    (DATA_DIR / "manifests/web.yaml").write_text(POD)
    container = wait("the pod to run", running_container)
    wait("the pod to serve", lambda: fetch("http://127.0.0.1:8080/") == "hello\n")
    print(run("pykubelet", "ps").rstrip())
    kubelet = unit_pid()

    step("upgrade")
    old_version = run("pykubelet", "version")
    run(*_APT, "install", new)
    assert run("pykubelet", "version") != old_version
    wait("another kubelet", lambda: unit("pykubelet", "is-active") == "active" and unit_pid() != kubelet)
    wait("the new kubelet to show the pod", lambda: "Running" in run("pykubelet", "ps", check=False))
    found = wait("the runtime", running_container)
    assert found == container, f"{container} became {found}"
    assert fetch("http://127.0.0.1:8080/") == "hello\n"
    assert status()["restartCount"] == 0
    assert status()["containerID"].endswith(container[0])
    print(f"container {container[0][:12]} with pid {container[1]}, started at {container[2]}, still runs")

    step("restart after a crash")
    kubelet = unit_pid()
    os.kill(kubelet, 9)
    wait("systemd to restart it", lambda: unit_pid() not in (0, kubelet))
    # Its containerd ended with it, and answers again after a moment.
    assert wait("the runtime", running_container) == container

    step("remove")
    run(*_APT, "remove", "pykubelet")
    assert running_container() is None
    assert (DATA_DIR / "manifests/web.yaml").exists(), "the manifest is gone"
    assert Path("/etc/default/pykubelet").exists(), "the configuration is gone"
    remaining = [line for line in state() - before if not line.startswith("file ")]
    assert not remaining, f"after the removal there is {remaining}"

    step("purge")
    run(*_APT, "purge", "pykubelet")
    difference = sorted(state() ^ before)
    assert not difference, "after the purge there is another state:\n" + "\n".join(difference[:40])
    print("passed")


def state() -> set[str]:
    """Return a line for everything that the package could leave behind."""
    found = {f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()}
    found |= {f"cgroup {path}" for path in directories("/sys/fs/cgroup") if "kube" in path or "pyk" in path}
    found |= {f"link {path.name}" for path in Path("/sys/class/net").iterdir()}
    found |= {f"rule {line}" for line in rules()}
    found |= {f"unit {line}" for line in units()}
    found |= {f"user {line}" for line in Path("/etc/passwd").read_text().splitlines()}
    found |= {f"process {name}" for name in processes()}
    for base in ("/etc", "/usr", "/var", "/opt", "/srv", "/lib/systemd", "/run"):
        for path in files(base):
            found.add(f"file {path}")
    return found


def units() -> list[str]:
    """Return the loaded units with our names; files of others are among the files."""
    listed = run(
        "systemctl", "list-units", "--all", "--plain", "--no-legend", "*kube*", "cri-*", "run-*netns*"
    )
    return [line.split()[0] for line in listed.splitlines()]


def files(base: str) -> list[str]:
    """Return all paths below a directory that no other program writes at any time."""
    found = []
    for directory, names, others in os.walk(base):
        names[:] = [name for name in names if not f"{directory}/{name}".startswith(_VOLATILE)]
        if directory.startswith(("/run/systemd", "/run/udev", "/run/host-share", "/run/log", "/run/dbus")):
            names[:] = []
            continue
        if "__pycache__" in directory:
            continue
        found += [f"{directory}/{name}" for name in (*names, *others) if name != "__pycache__"]
    return [path for path in found if not path.startswith(_VOLATILE)]


def directories(base: str) -> list[str]:
    """Return all directories below one."""
    return [directory for directory, _, _ in os.walk(base)]


def rules() -> list[str]:
    """Return all rules and chains of the packet filter that are not the kernel's own."""
    lines = []
    for table in ("filter", "nat", "mangle"):
        printed = run("iptables", "-t", table, "-S", check=False)
        lines += [f"{table} {line}" for line in printed.splitlines() if not line.startswith("-P ")]
    return lines


def processes() -> set[str]:
    """Return the names of programs of ours and of containers."""
    found = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            try:
                name = (path / "comm").read_text().strip()
            except OSError:
                continue
            if name.startswith(("containerd", "kubelet", "pykubelet", "runc", "pause", "httpd", "catatonit")):
                found.add(name)
    return found


def running_container() -> tuple[str, int, str] | None:
    """Return ID, pid and start time of the pod's container."""
    if not SOCKET.exists():
        return None
    listed = run("ctr", "--address", str(SOCKET), "-n", "k8s.io", "tasks", "ls", check=False)
    for line in listed.splitlines()[1:]:
        id, pid, what = line.split()
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes()
            ticks = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        except OSError:
            continue
        if what == "RUNNING" and arguments.startswith(b"httpd"):
            return id, int(pid), ticks
    return None


def status() -> dict[str, Any]:
    """Return the status of the only container, from the kubelet."""
    pods = json.loads(fetch("http://127.0.0.1:10255/pods"))["items"]
    (pod,) = [pod for pod in pods if pod["metadata"]["name"].startswith("web")]
    found: dict[str, Any] = pod["status"]["containerStatuses"][0]
    return found


def fetch(url: str) -> str:
    """Return the body of a response, empty on failure."""
    script = (
        "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read().decode(), end='')"
    )
    return run(sys.executable, "-c", script, url, check=False)


def unit(name: str, question: str) -> str:
    """Return systemctl's word about a unit."""
    return run("systemctl", question, f"{name}.service", check=False).strip()


def unit_pid() -> int:
    """Return the kubelet's pid."""
    return int(run("systemctl", "show", "--value", "-p", "MainPID", "pykubelet.service").strip() or 0)


def wait(what: str, condition: Callable[[], T | None]) -> T:
    """Wait until a condition is true and return its value."""
    deadline = time.monotonic() + SLOW
    while not (value := condition()):
        if time.monotonic() > deadline:
            print(run("journalctl", "-n", "40", "--no-pager", "-u", "*kubelet*", check=False))
            raise AssertionError(f"waited in vain for {what}")
        time.sleep(0.5)
    return value


def run(*command: str, check: bool = True) -> str:
    """Run a program and return its output."""
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if check and done.returncode != 0:
        journal = subprocess.run(
            ["journalctl", "-n", "40", "--no-pager", "-u", "*kubelet*"], capture_output=True, text=True
        )
        raise AssertionError(
            f"{' '.join(command)} failed with {done.returncode}:\n"
            f"{done.stdout}{done.stderr}\n{journal.stdout}"
        )
    return done.stdout


def step(name: str) -> None:
    """Print the step that begins."""
    print(f"[{time.strftime('%H:%M:%S')}] {name}", flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except AssertionError as err:
        print(f"failed: {err}", flush=True)
        sys.exit(1)
