"""The Debian package: its contents, lintian's opinion, and its life in a clean Debian without systemd."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pykubelet import KUBERNETES_VERSION, __version__
from release.deb import build_deb, debian_version
from release.environment import PREFIX
from release.sources import BuildError, find_release
from tests.support.packages import built_deb, run_in_debian

pytestmark = [pytest.mark.machine, pytest.mark.timeout(900)]
DEVELOPMENT = {"grpcio", "grpcio_tools", "hypothesis", "mypy", "pytest", "ruff"}
"""Packages that only development needs."""
INSTALL = "apt-get install -qq -y --no-install-recommends /mnt/pykubelet.deb"
STEPS = f"""\
set -e
find / -xdev -name '*kubelet*' -o -xdev -name '*kubernetes*' | sort >/tmp/before
{INSTALL} >/dev/null
echo "$(kubelet --version)|$(pykubelet version)|$(readlink -f /usr/bin/kubelet)"
pykubelet doctor | sed -n 's/^ok *programs */programs: /p'
systemctl is-enabled kubelet.service
systemctl is-enabled pykubelet.service || true
cd /lib/systemd/system
systemd-analyze verify --man=no kubelet.service pykubelet.service 2>&1 |
    grep -E 'kubelet.service:' || echo 'units verified'
echo 'KUBELET_EXTRA_ARGS=--v=4' >/etc/default/kubelet
dpkg -i /mnt/pykubelet.deb >/dev/null
cat /etc/default/kubelet
apt-get remove -qq -y pykubelet >/dev/null
echo "kept: $(cat /etc/default/kubelet)"
apt-get purge -qq -y pykubelet >/dev/null
find / -xdev -name '*kubelet*' -o -xdev -name '*kubernetes*' | sort >/tmp/after
diff /tmp/before /tmp/after
echo 'nothing is left'
"""


def list_contents(deb: Path) -> dict[str, str]:
    """Return the modes of a package's files by path."""
    listed = subprocess.run(["dpkg-deb", "-c", deb], check=True, capture_output=True, text=True).stdout
    rows = [line.split(None, 5) for line in listed.splitlines()]
    assert {row[1] for row in rows} == {"root/root"}
    return {row[5].split(" -> ")[0].removeprefix("."): row[0] for row in rows}


def test_deb_contents_are_programs_units_and_private_environment() -> None:
    contents = list_contents(built_deb())
    for path in (
        "/usr/bin/kubelet",
        "/usr/bin/pykubelet",
        "/lib/systemd/system/kubelet.service",
        "/lib/systemd/system/pykubelet.service",
        "/etc/default/kubelet",
        "/etc/default/pykubelet",
        "/usr/share/doc/pykubelet/copyright",
        "/usr/share/doc/pykubelet/packages.md.gz",
    ):
        assert path in contents
    site = re.compile(rf"{PREFIX}/lib/python3\.\d+/site-packages/(.*)")
    modules = [match[1] for path in contents if (match := site.fullmatch(path))]
    assert DEVELOPMENT.isdisjoint(name.split("/")[0] for name in modules)
    sources = {name for name in modules if name.endswith(".py")}
    assert "pykubelet/cri/runtime_pb2.py" in sources
    compiled = {
        re.sub(r"__pycache__/(.*)\.cpython-\d+\.pyc", r"\1.py", name)
        for name in modules
        if name.endswith(".pyc")
    }
    assert sources == compiled


def test_deb_lintian_reports_no_errors() -> None:
    done = subprocess.run(
        ["lintian", "--allow-root", "--fail-on", "error", built_deb()], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


def test_deb_built_twice_is_identical(tmp_path: Path) -> None:
    first = built_deb()
    # Compiled modules depend on the directory of the build if anything does; this one has another name.
    again = build_deb(find_release(), tmp_path / "another directory", compression="gzip")
    assert first.name == again.name == f"pykubelet_{debian_version(find_release())}_amd64.deb"
    assert first.read_bytes() == again.read_bytes()


def test_deb_in_clean_debian_installs_and_purges_without_trace(tmp_path: Path) -> None:
    shutil.copy(built_deb(), tmp_path / "pykubelet.deb")
    done = run_in_debian(["sh", "-c", STEPS], tmp_path)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    version = f"Kubernetes {KUBERNETES_VERSION}+pykubelet{__version__}"
    programs = "busybox, catatonit, containerd, containerd-shim-runc-v2, ctr, ip, iptables, runc, setpriv"
    assert done.stdout.splitlines() == [
        f"{version}|{version}|{PREFIX}/bin/kubelet",
        f"programs: {programs}",
        "enabled",
        "disabled",
        "units verified",
        "KUBELET_EXTRA_ARGS=--v=4",
        "kept: KUBELET_EXTRA_ARGS=--v=4",
        "nothing is left",
    ]


def test_release_version_invalid_is_rejected() -> None:
    with pytest.raises(BuildError, match=r"'1\.0 beta' is not valid: use numbers such as"):
        find_release("1.0 beta")
