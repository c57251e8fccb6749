"""Where the control plane's programs come from, and what is said when they cannot be had."""

import os
import subprocess
import threading
from pathlib import Path

import pytest

from pykubelet.devcluster import binaries as build
from pykubelet.devcluster.binaries import find_programs
from pykubelet.devcluster.layout import NotAvailable

ALL = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")
GOOD = """#!/bin/sh
echo started >>{log}
while [ $# -gt 0 ]; do [ "$1" = -o ] && out=$2; shift; done
echo k8s.io/some/package >&2
sleep 0.2
printf '#!/bin/sh\\n' >"$out"
chmod +x "$out"
"""
BAD = """#!/bin/sh
echo 'go: downloading k8s.io/kubernetes v1.36.3' >&2
echo 'go: k8s.io/kubernetes: dial tcp: lookup proxy.golang.org: no such host' >&2
exit 1
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Go, without etcd and with an empty cache."""
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "search_path", lambda: str(tmp_path / "bin"))
    monkeypatch.setattr(build, "GO_INSTALL_DIR", "")
    return tmp_path


def programs_in(folder: Path, *names: str) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    for name in names:
        (folder / name).write_text("#!/bin/sh\n")
        (folder / name).chmod(0o755)
    return {"KUBEBUILDER_ASSETS": str(folder)}


def go(place: Path, script: str) -> Path:
    log, path = place / "go.log", place / "bin" / "go"
    path.write_text(script.replace("{log}", str(log)).replace("sleep", "/bin/sleep"))
    path.write_text(path.read_text().replace("chmod", "/bin/chmod"))
    path.chmod(0o755)
    return log


def test_find_programs_all_in_assets_returns_assets(place: Path) -> None:
    environ = programs_in(place / "assets", *ALL)
    found = find_programs(pytest.fail, environ)
    assert found.scheduler == place / "assets" / "kube-scheduler"
    assert found.kubelet is None


def test_find_programs_assets_without_etcd_raises_not_available(place: Path) -> None:
    environ = programs_in(place / "assets", "kube-scheduler")
    with pytest.raises(NotAvailable, match="has no etcd and no kube-apiserver: put it there"):
        find_programs(pytest.fail, environ)


def test_find_programs_incomplete_assets_builds_missing_binaries(place: Path) -> None:
    go(place, GOOD)
    environ = programs_in(place / "assets", "etcd", "kube-apiserver")
    found = find_programs(lambda _: None, environ)
    assert found.apiserver.parent == place / "assets"
    assert found.controller_manager.is_relative_to(place / "cache")
    assert found.kubelet is not None


def test_find_programs_without_go_raises_not_available(place: Path) -> None:
    environ = programs_in(place / "assets", "etcd", "kube-apiserver")
    with pytest.raises(NotAvailable, match="Go is not installed: install Go"):
        find_programs(pytest.fail, environ)


def test_build_control_plane_second_call_uses_cache(place: Path) -> None:
    log, said = go(place, GOOD), list[str]()
    first = build.build_control_plane(said.append)
    assert first == build.build_control_plane(pytest.fail)
    assert log.read_text() == "started\n"
    assert said[0].startswith("Building the control plane, Kubernetes v1.")
    assert all(os.access(path, os.X_OK) for path in first.values())
    assert subprocess.run([first["kubectl"]], check=False).returncode == 0


def test_build_control_plane_concurrent_calls_build_once(place: Path) -> None:
    log = go(place, GOOD)
    builders = [threading.Thread(target=build.build_control_plane, args=(lambda _: None,)) for _ in range(3)]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join(120)
    assert log.read_text() == "started\n"


def test_build_control_plane_failure_leaves_no_output_and_is_retried(place: Path) -> None:
    go(place, BAD)
    with pytest.raises(NotAvailable) as caught:
        build.build_control_plane(lambda _: None)
    told = str(caught.value)
    assert "no such host" in told
    assert "downloading" not in told
    assert "\n" not in told
    cache = place / "cache" / "pykubelet" / "controlplane"
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    go(place, GOOD)
    assert build.build_control_plane(lambda _: None)["kubelet"].exists()


def test_module_cache_dir_changed_module_yields_other_directory(place: Path) -> None:
    module = place / "module"
    module.mkdir()
    for path in build.source_module().iterdir():
        (module / path.name).write_bytes(path.read_bytes())
    before = build.module_cache_dir(module)
    (module / "go.sum").write_text("changed")
    assert build.module_cache_dir(module) != before


def test_ensure_built_several_targets_each_built_with_its_command(place: Path) -> None:
    """Verify that a module of several programs is built whole, and that each has its own subcommand."""
    go(place, GOOD.replace("echo started >>{log}", 'echo "$1 $2 cgo=$CGO_ENABLED" >>{log}'))
    sources = place / "module"
    sources.mkdir()
    (sources / "go.mod").write_text("require k8s.io/kubernetes v1.36.3\n")
    (sources / "go.sum").touch()
    targets = {
        "suite": build.GoBuild("x/suite", subcommand=("test", "-c")),
        "tool": build.GoBuild("x/tool", env={"CGO_ENABLED": "0"}, links=("alias",)),
    }
    module = build.GoModule(sources, "several", "the suite", "", targets)
    built = build.ensure_built(module, lambda _: None)
    assert sorted(path.name for path in built.iterdir()) == ["alias", "suite", "tool"]
    assert (place / "go.log").read_text().splitlines() == ["test -c cgo=", "build -v cgo=0"]
    (sources / "more").mkdir()
    (sources / "more" / "main.go").write_text("package main\n")
    assert build.module_cache_dir(sources, "several") != built
