"""`pykubelet up --install` and `--uninstall`: the node as a service of systemd.

The unit starts the same `pykubelet up` with the flags given at the installation. `KillMode=process` leaves
the containers running when the service stops, as Ctrl-C does. Both operations can be repeated: an
installation that changes nothing restarts nothing. Only a unit file with this module's first line is
replaced or removed.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pykubelet.cli.errors import print_error
from pykubelet.cli.node.up import start_problem
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.parser import FlagOccurrence, parse_flags
from pykubelet.config.load import load
from pykubelet.linux.process_limits import is_root
from pykubelet.standalone.data_dir import claim, lock_owner
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.util.files import write_if_changed

PROGRAM = "pykubelet up"
UNITS = Path("/etc/systemd/system")
RUNNING_SYSTEMD = Path("/run/systemd/system")
"""Directory that exists if systemd is the service manager of this host (sd_booted)."""
PATH_FLAGS = frozenset(
    {
        "bootstrap-kubeconfig",
        "cert-dir",
        "client-ca-file",
        "cloud-config",
        "config",
        "config-dir",
        "device-plugin-dir",
        "experimental-mounter-path",
        "image-credential-provider-bin-dir",
        "image-credential-provider-config",
        "kubeconfig",
        "lock-file",
        "log-dir",
        "log-file",
        "pod-checkpoint-dir",
        "pod-manifest-path",
        "resolv-conf",
        "root-dir",
        "tls-cert-file",
        "tls-private-key-file",
        "volume-plugin-dir",
    }
)
"""Flags of the kubelet whose value is a path."""
_FIRST_LINE = "# Written by `pykubelet up --install`; install again with other flags to change it."
_WANTS = "multi-user.target.wants"
"""Directory below UNITS with the links of the enabled units that have our `[Install]` section."""
_TIMEOUT_SECONDS = 300.0


class ServiceError(Exception):
    """Raised when the service cannot be installed or removed; one line."""


def unit_text(command: Sequence[str]) -> str:
    """Return the unit file that runs a command."""
    return f"""\
{_FIRST_LINE}
[Unit]
Description=Kubernetes node (pykubelet)
Documentation=man:pykubelet(1)
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=0

[Service]
Type=notify
ExecStart={" ".join(map(quoted, command))}
ExecReload=/bin/kill -HUP $MAINPID
KillMode=process
Delegate=yes
# Exit code 0 is a stop on request, such as by pykubelet down; every failure is followed by a restart.
Restart=on-failure
RestartSec=2
TimeoutStartSec=5min
LimitNOFILE=1048576
TasksMax=infinity
OOMScoreAdjust=-999

[Install]
WantedBy=multi-user.target
"""


def quoted(word: str) -> str:
    """Quote a word of ExecStart, in which systemd expands % and $."""
    text = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return text if text and not set(text) & set(" \t'\";") else f'"{text}"'


def with_absolute_paths(flags: Sequence[str], directory: Path) -> Sequence[str]:
    """Return flags of the kubelet with absolute paths: the unit has another working directory."""
    found = parse_flags(flags).occurrences
    if not any(_is_relative(one) for one in found):
        return flags
    texts = [str(directory / one.text) if _is_relative(one) else one.text for one in found]
    return [f"--{one.flag.name}={text}" for one, text in zip(found, texts, strict=True)]


def _is_relative(occurrence: FlagOccurrence) -> bool:
    text = occurrence.text
    return occurrence.flag.name in PATH_FLAGS and text != "" and not text.startswith("/")


def run_install(data_dir: Path, endpoint: str | None, verbosity: int, flags: Sequence[str]) -> int:
    """Install, enable and start the service; return the exit code."""
    try:
        instance = Instance.at(data_dir)
        _require_systemd()
        requested = load(flags)
        flags = with_absolute_paths(flags, Path.cwd())
        if bad := [word for word in (*flags, str(instance.data_dir)) if not word.isprintable()]:
            raise ServiceError(f"a unit file cannot contain {bad[0]!r}: leave out control characters")
        path = _unit(instance)
        _require_own(path)
        if lock_owner(instance) is not None and not _is_active(path.name):
            raise ServiceError(f"a node runs on {instance.data_dir} already: stop it with Ctrl-C first")
        if not _is_active(path.name) and (problem := start_problem(requested)):
            raise ServiceError(problem)
        claim(instance)
        text = unit_text(_command(instance, endpoint, verbosity, flags))
        changed = write_if_changed(path, text.encode(), 0o644)
        _systemctl("daemon-reload")
        _systemctl("enable", path.name)
        _systemctl("restart" if changed else "start", path.name)
    except (ConfigError, EmbeddedError, ServiceError) as err:
        return print_error(PROGRAM, err)
    except OSError as err:
        return print_error(PROGRAM, f"cannot install the service: {err}")
    print(f"{path.name} is enabled and runs; its log: journalctl -u {path.stem}")
    return 0


def run_uninstall(data_dir: Path) -> int:
    """Stop and remove the service, and leave containers and data; return the exit code."""
    try:
        instance = Instance.at(data_dir)
        _require_systemd()
        path = _unit(instance)
        if not path.exists():
            print(f"No service {path.name} is installed.")
            return 0
        _require_own(path)
        _systemctl("disable", "--now", path.name)
        path.unlink(missing_ok=True)
        _systemctl("daemon-reload")
    except (EmbeddedError, ServiceError) as err:
        return print_error(PROGRAM, err)
    except OSError as err:
        return print_error(PROGRAM, f"cannot remove the service: {err}")
    option = "" if instance.name == "pykubelet" else f" --data-dir {instance.data_dir}"
    print(f"{path.name} is removed; containers still run: `pykubelet down{option}` removes them")
    return 0


def enabled_service(instance: Instance) -> str | None:
    """Return what the enabled service of a node will do and how to disable it, or None without one.

    It is read from the links of systemd, so that a host without systemd has none and systemd need not run.
    """
    path = _unit(instance)
    if not os.path.lexists(UNITS / _WANTS / path.name):
        return None
    option = "" if instance.name == "pykubelet" else f" --data-dir {shlex.quote(str(instance.data_dir))}"
    try:
        is_own = path.read_text(errors="replace").startswith(_FIRST_LINE)
    except OSError:
        is_own = False  # that of the package, or of a user
    remedy = f"pykubelet up --uninstall{option}" if is_own else f"systemctl disable {path.name}"
    return f"{path.name} is still enabled and starts a new node at the next boot: `{remedy}` prevents it"


def _command(instance: Instance, endpoint: str | None, verbosity: int, flags: Sequence[str]) -> list[str]:
    program = Path(sys.executable).with_name("pykubelet")
    found = str(program) if program.exists() else shutil.which("pykubelet")
    if found is None:
        raise ServiceError("the program pykubelet is not in PATH: install the package first")
    words = [found, "up", "--data-dir", str(instance.data_dir)]
    words += ["--container-runtime-endpoint", endpoint] if endpoint else []
    words += ["-v", str(verbosity)] if verbosity else []
    return [*words, *flags]


def _unit(instance: Instance) -> Path:
    return UNITS / f"{instance.name}.service"


def _require_systemd() -> None:
    if not is_root():
        raise ServiceError("root is needed to install a service: run it with sudo")
    if not RUNNING_SYSTEMD.is_dir():
        raise ServiceError(
            "this host does not run systemd: start `pykubelet up` from its own service manager"
        )


def _require_own(path: Path) -> None:
    if path.exists() and not path.read_text(errors="replace").startswith(_FIRST_LINE):
        raise ServiceError(f"{path} was not written by pykubelet: remove it, or choose another --data-dir")


def _is_active(name: str) -> bool:
    command = ["systemctl", "is-active", "--quiet", name]
    return subprocess.run(command, check=False, timeout=_TIMEOUT_SECONDS).returncode == 0


def _systemctl(*arguments: str) -> None:
    try:
        done = subprocess.run(
            ["systemctl", *arguments], capture_output=True, text=True, timeout=_TIMEOUT_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as err:
        raise ServiceError(f"systemctl {arguments[0]} failed: {err}") from err
    if done.returncode:
        reason = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise ServiceError(f"systemctl {' '.join(arguments)} failed: {reason}")
