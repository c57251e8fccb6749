"""Where the control plane's programs come from.

`$KUBEBUILDER_ASSETS` first, as everywhere in the Kubernetes world; what is not there is built from
source once (`build.py`). etcd comes from the assets or from the machine (Debian: etcd-server).
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from pykubelet.devcluster.build import BUILT, built_programs
from pykubelet.devcluster.errors import NotAvailable
from pykubelet.host.processes import search_path

ASSETS = "KUBEBUILDER_ASSETS"
_REQUIRED = ("etcd", "kube-apiserver")
_WANTED = ("kube-controller-manager", "kube-scheduler", "kubectl")


@dataclass(frozen=True, slots=True)
class Programs:
    """The programs of a control plane, and two that go with it."""

    etcd: Path
    apiserver: Path
    controller_manager: Path
    scheduler: Path
    kubectl: Path
    kubelet: Path | None
    """The reference kubelet, to compare ourselves with."""


def find_programs(
    say: Callable[[str], None], environ: Mapping[str, str] = os.environ, module: Path | None = None
) -> Programs:
    """Find the programs, building what is missing; `say` hears of a build's progress.

    Raises NotAvailable with the reason. Only the reference kubelet may be missing.
    """
    found = _assets(environ)
    if "etcd" not in found:
        found["etcd"] = _etcd()
    if any(name not in found for name in (*_REQUIRED, *_WANTED)):
        found = {**built_programs(say, module), **found}
    return Programs(
        etcd=found["etcd"],
        apiserver=found["kube-apiserver"],
        controller_manager=found["kube-controller-manager"],
        scheduler=found["kube-scheduler"],
        kubectl=found["kubectl"],
        kubelet=found.get("kubelet"),
    )


def version_of(programs: Programs) -> str:
    """The control plane's version, such as v1.36.3; empty when it does not say."""
    done = subprocess.run([programs.apiserver, "--version"], capture_output=True, text=True, check=False)
    return done.stdout.split()[-1] if done.stdout.split() else ""


def _assets(environ: Mapping[str, str]) -> dict[str, Path]:
    folder = environ.get(ASSETS, "")
    if not folder:
        return {}
    names = ("etcd", *BUILT)
    found = {name: Path(folder, name) for name in names if os.access(Path(folder, name), os.X_OK)}
    if missing := [name for name in _REQUIRED if name not in found]:
        raise NotAvailable(
            f"{ASSETS}={folder} has no {' and no '.join(missing)}: put it there, or unset the variable"
        )
    return found


def _etcd() -> Path:
    found = shutil.which("etcd", path=search_path())
    if found is None:
        raise NotAvailable(f"etcd is not installed: install it (Debian: etcd-server), or set {ASSETS}")
    return Path(found)
