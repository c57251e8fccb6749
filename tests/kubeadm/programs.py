"""Executables of a cluster made by kubeadm, unmodified, built from the Go module proxy into the cache.

kubeadm and kube-proxy come from `k8s.io/kubernetes` in the version of the tests' control plane, etcd and
CoreDNS from their own modules in the versions that this kubeadm deploys. Each is a `tool` of a module in
`modules/`, so that it is built from upstream's own main package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pykubelet.devcluster.binaries import GoBuild, GoModule, build_control_plane, ensure_built

MODULES = Path(__file__).parent / "modules"
_STATIC = {"CGO_ENABLED": "0"}


@dataclass(frozen=True, slots=True)
class Programs:
    """The executables by name."""

    kubeadm: Path
    proxy: Path
    coredns: Path
    etcd: Path
    apiserver: Path
    controller_manager: Path
    scheduler: Path
    kubectl: Path


def find_programs(report: Callable[[str], None]) -> Programs:
    """Return the executables, building those that the cache lacks. Raises NotAvailable with the reason."""
    control_plane = build_control_plane(report)
    kubernetes = ensure_built(_KUBERNETES, report)
    return Programs(
        kubeadm=kubernetes / "kubeadm",
        proxy=kubernetes / "kube-proxy",
        coredns=ensure_built(_COREDNS, report) / "coredns",
        etcd=ensure_built(_ETCD, report) / "etcd",
        apiserver=control_plane["kube-apiserver"],
        controller_manager=control_plane["kube-controller-manager"],
        scheduler=control_plane["kube-scheduler"],
        kubectl=control_plane["kubectl"],
    )


_KUBERNETES = GoModule(
    directory=MODULES / "kubernetes",
    name="kubeadm",
    title="kubeadm and kube-proxy",
    remedy="",
    programs={
        "kubeadm": GoBuild("k8s.io/kubernetes/cmd/kubeadm", env=_STATIC),
        "kube-proxy": GoBuild("k8s.io/kubernetes/cmd/kube-proxy", env=_STATIC),
    },
)
_COREDNS = GoModule(
    directory=MODULES / "coredns",
    name="coredns",
    title="CoreDNS",
    remedy="",
    programs={"coredns": GoBuild("github.com/coredns/coredns", env=_STATIC)},
    source="github.com/coredns/coredns",
)
_ETCD = GoModule(
    directory=MODULES / "etcd",
    name="etcd",
    title="etcd",
    remedy="",
    programs={"etcd": GoBuild("go.etcd.io/etcd/server/v3", env=_STATIC)},
    source="go.etcd.io/etcd/server/v3",
)
