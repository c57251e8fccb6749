"""Processes are moved to where the configuration wants them, in every hierarchy."""

import subprocess

import pytest

from pykubelet.host.cgroups import detect_cgroups
from pykubelet.resources.cgroup_files import CgroupFiles
from pykubelet.resources.cgroup_names import parse_path
from pykubelet.resources.cgroup_values import CgroupValues
from pykubelet.resources.daemon_cgroups import cgroup_of, join, strays
from tests.resources.test_cgroup_tree import needs_v1, process_in, root

__all__ = ["root"]

pytestmark = [pytest.mark.machine, needs_v1]


def test_a_process_is_moved_once(root: str) -> None:
    found = detect_cgroups()
    with subprocess.Popen(["sleep", "300"]) as process:
        try:
            join(found, f"{root}/daemons", [process.pid])
            for controller in found.mounts:
                members = (found.path(controller, f"{root}/daemons") / "cgroup.procs").read_text()
                assert members.split() == [str(process.pid)], controller
            assert cgroup_of(found, process.pid) == f"{root}/daemons"
            join(found, f"{root}/daemons", [process.pid])
        finally:
            process.kill()
    assert cgroup_of(found, process.pid) is None
    # Nobody is left to be moved, and nothing is made for nobody.
    join(found, f"{root}/none", [process.pid])
    assert not found.path("cpu", f"{root}/none").exists()


def test_who_is_nowhere(root: str) -> None:
    found = detect_cgroups()
    CgroupFiles(found).make(parse_path(root), CgroupValues())
    with process_in(root) as process:
        assert strays(found, root) == {process.pid}
        join(found, f"{root}/system", strays(found, root))
        assert strays(found, root) == set()
        assert cgroup_of(found, process.pid) == f"{root}/system"
    # The first process stays, and so do the kernel's own, of which the second is the parent.
    assert not strays(found) & {1, 2}
