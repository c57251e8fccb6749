"""`pykubelet up` runs a node with a private container runtime; `pykubelet down` removes it.

`up` writes its settings to `DIR/kubelet.yaml`, an ordinary KubeletConfiguration that users can read; flags
on the command line override it. The file is rewritten at each start. `down` removes what `up` created and
reports what could not be removed; it can be repeated.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import yaml

from pykubelet.agent.kubelet import Kubelet
from pykubelet.agent.live_config import ReloadTrigger
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.cli.errors import print_error
from pykubelet.cli.node.up_defaults import UP_DEFAULTS
from pykubelet.cli.process import host_problems, launch
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.flags.parser import parse_flags
from pykubelet.config.kubeconfig_file import load_kubeconfig
from pykubelet.config.load import LoadedConfig, load
from pykubelet.config.types import API_VERSION, KIND
from pykubelet.kuberuntime.runtime_features import missing_by_version
from pykubelet.linux.port_owner import find_port_owner
from pykubelet.linux.process_limits import is_root
from pykubelet.logs.setup import configure_early
from pykubelet.standalone.data_dir import claim, hold_lock, make_directories
from pykubelet.standalone.instance import EmbeddedError, Instance
from pykubelet.standalone.requirements import HostRequirements, format_version
from pykubelet.standalone.runtime import PrivateRuntime
from pykubelet.standalone.teardown import down
from pykubelet.util.files import write_if_changed
from pykubelet.volumes.local_claims import DIRECTORY as VOLUMES
from pykubelet.volumes.local_claims import claims_with_data

PROGRAM = "pykubelet up"
PAGE_PORT = 4194
"""Port of the page unless one of `PAGE_FLAGS` is given; a node starts without the page if it is taken."""
PAGE_FLAGS = frozenset({"page-port", "cadvisor-port"})
FLAGS = {"API": "port", "health": "healthz-port", "read-only": "read-only-port", "page": "page-port"}


def standalone_config(instance: Instance, endpoint: str) -> dict[str, Any]:
    """Return the configuration of a standalone node on a host that also serves other purposes."""
    return {
        **_common_config(instance, endpoint),
        # Serve on loopback only: without an API server requests cannot be authorized.
        "address": "127.0.0.1",
        "readOnlyPort": 10255,
        "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": False}},
        "authorization": {"mode": "AlwaysAllow"},
    }


def cluster_config(instance: Instance, endpoint: str, authority: Path | None) -> dict[str, Any]:
    """Return the configuration of a cluster node; `authority` is the CA file of its clients."""
    return {
        **_common_config(instance, endpoint),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            **({"x509": {"clientCAFile": str(authority)}} if authority is not None else {}),
        },
        "authorization": {"mode": "Webhook"},
        "clusterDomain": "cluster.local",
        "rotateCertificates": True,
        "podPidsLimit": 4096,
        "seccompDefault": True,
    }


def _common_config(instance: Instance, endpoint: str) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "staticPodPath": str(instance.manifests),
        "podLogsDir": str(instance.pod_logs),
        "containerRuntimeEndpoint": endpoint,
        "cgroupRoot": instance.cgroup_root,
        **UP_DEFAULTS,
    }


def run_up(data_dir: Path, endpoint: str | None, verbosity: int, flags: Sequence[str]) -> int:
    """Run the node until it is stopped; return the exit code."""
    try:
        instance = Instance.at(data_dir)
        requested = load(flags)
        if problem := start_problem(requested):
            return print_error(PROGRAM, problem)
        claim(instance)
        config = _config(instance, endpoint or instance.endpoint, requested)
        loaded = load(_write_config(instance, config, verbosity, flags))
    except (ConfigError, EmbeddedError, KubeconfigError) as err:
        return print_error(PROGRAM, err)
    except OSError as err:
        return print_error(PROGRAM, f"data directory {data_dir} cannot be used: {err}")
    trigger = ReloadTrigger()
    page_port = 0 if PAGE_FLAGS & set(parse_flags(flags).names()) else _default_page_port()
    return launch(
        PROGRAM,
        loaded,
        lambda: _run_kubelet(instance, loaded, endpoint, trigger, page_port),
        on_hangup=trigger.request,
    )


def _default_page_port() -> int:
    """Return the default port of the page; 0 with a warning if it is taken."""
    if not (owner := find_port_owner(PAGE_PORT)):
        return PAGE_PORT
    print(
        f"{PROGRAM}: warning: port {PAGE_PORT} is taken by {owner}: the node starts without its page; "
        "choose another port with --page-port",
        file=sys.stderr,
        flush=True,
    )
    return 0


def start_problem(requested: LoadedConfig) -> str | None:
    """Return the reason why a start would fail, or None; nothing is created before."""
    if not is_root():
        return "root is needed to manage containers: run it with sudo"
    if requested.flags.config or requested.flags.config_dir:
        return (
            "`up` writes its own configuration: give single flags, or use the `kubelet` program with --config"
        )
    config = requested.config
    ports = {"API": config.port, "health": config.healthz_port, "read-only": config.read_only_port}
    ports["page"] = requested.flags.page_port
    for name, port in ports.items():
        if port and (owner := find_port_owner(port)):
            return f"port {port} of the {name} server is taken by {owner}: stop that, or give --{FLAGS[name]}"
    return None


def _config(instance: Instance, endpoint: str, requested: LoadedConfig) -> dict[str, Any]:
    make_directories(instance)
    flags = requested.flags
    if flags.standalone:
        return standalone_config(instance, endpoint)
    # The CA of the API server usually signs client certificates, too; a flag can override it.
    existing = [
        path for path in (flags.kubeconfig, flags.bootstrap_kubeconfig) if path and Path(path).exists()
    ]
    authority = load_kubeconfig(Path(existing[0] if existing else flags.kubeconfig)).ca
    if isinstance(authority, bytes):
        path = instance.kubelet_root / "pki" / "cluster-ca.crt"
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_if_changed(path, authority, 0o644)
        authority = path
    return cluster_config(instance, endpoint, authority)


def _write_config(
    instance: Instance, config: dict[str, Any], verbosity: int, flags: Sequence[str]
) -> list[str]:
    path = instance.data_dir / "kubelet.yaml"
    text = yaml.safe_dump(config, sort_keys=False)
    head = "# Written by `pykubelet up` at each start; give flags to `up` to change a value.\n"
    write_if_changed(path, (head + text).encode(), 0o644)
    root = instance.kubelet_root
    own_flags = [
        f"--config={path}",
        f"--root-dir={root}",
        f"--cert-dir={root / 'pki'}",
        # Another kubelet on this host may use the default device plugin directory.
        f"--device-plugin-dir={root / 'device-plugins'}",
    ]
    return [*own_flags, *([f"--v={verbosity}"] if verbosity else []), *flags]


async def _run_kubelet(
    instance: Instance, loaded: LoadedConfig, endpoint: str | None, trigger: ReloadTrigger, page_port: int
) -> None:
    async def run(host: HostRequirements | None) -> None:
        kubelet = Kubelet(
            loaded,
            on_started=lambda: _print_started(instance, loaded, host, page_port),
            tunes_kernel=False,
            reload_trigger=trigger,
            default_page_port=page_port,
            host_problems=host_problems,
        )
        await kubelet.run()

    if endpoint is not None:
        with hold_lock(instance, "up"):
            await run(None)
        return
    async with PrivateRuntime(instance, cgroup_driver=loaded.config.cgroup_driver) as runtime:
        await run(runtime.host)


def runtime_line(host: HostRequirements) -> str:
    """Return the line about the private runtime: its version, and what only newer ones can do."""
    version = format_version(host.containerd_version)
    line = f"Runtime: containerd {version} ({host.programs['containerd']})"
    if missing := missing_by_version("containerd", version):
        line += f", which has no {', '.join(missing)}: install containerd 2.1 or newer if pods need them"
    return line


def _print_started(
    instance: Instance, loaded: LoadedConfig, host: HostRequirements | None = None, page_port: int = 0
) -> None:
    config = loaded.config
    health = f"http://{config.healthz_bind_address}:{config.healthz_port}/healthz"
    down = (
        "pykubelet down" if instance.name == "pykubelet" else f"pykubelet down --data-dir {instance.data_dir}"
    )
    runtime = f"{runtime_line(host)}\n" if host is not None else ""
    page = f"{page_url(loaded.flags, page_port)}   " if loaded.flags.page_port or page_port else ""
    print(
        f"\nNode is up: put pod manifests into {config.static_pod_path}\n"
        f"{runtime}"
        f"{page}Health: curl {health}   Stop: Ctrl-C   Remove everything: {down}\n",
        file=sys.stderr,
        flush=True,
    )


def page_url(flags: KubeletFlags, default_port: int) -> str:
    """Return the address of the page for the message after the start."""
    address = ip_address(flags.page_address)
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"Page: http{'' if address.is_loopback else 's'}://{host}:{flags.page_port or default_port}"


DOWN_PROGRAM = "pykubelet down"


def run_down(data_dir: Path, *, volumes: bool = False, keep_data: bool = False) -> int:
    """Remove everything that `up` created, or with `keep_data` all but files; return the exit code.

    Data of claims is deleted only with `volumes`: without it nothing is removed while there is some. A
    service that systemd starts at the next boot stays enabled, which the last line reports.
    """
    # Imported here: it imports this module.
    from pykubelet.cli.node.service import enabled_service

    if not is_root():
        return print_error(DOWN_PROGRAM, "root is needed to remove containers: run it with sudo")
    configure_early()
    try:
        instance = Instance.at(data_dir)
        claims = claims_with_data(instance.kubelet_root)
        if claims and not volumes and not keep_data:
            return print_error(
                DOWN_PROGRAM,
                f"the node has data of {len(claims)} claims ({', '.join(claims[:5])}): say --volumes to "
                f"delete it, too; it is in {instance.kubelet_root / VOLUMES}",
            )
        remaining = asyncio.run(down(instance, print, keep_data=keep_data))
    except EmbeddedError as err:
        return print_error(DOWN_PROGRAM, err)
    except KeyboardInterrupt:
        return print_error(DOWN_PROGRAM, "interrupted: run it again to finish")
    for line in remaining:
        print_error(DOWN_PROGRAM, f"could not remove {line}")
    if remaining:
        return 1
    print(f"Nothing is left but files in {data_dir}." if keep_data else "Nothing is left.")
    if note := enabled_service(instance):
        print(note)
    return 0
