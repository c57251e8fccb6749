import json
from pathlib import Path

import pytest

from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import Pod, PodSpec
from pykubelet.kuberuntime.configuration.user_namespaces import (
    UNIT,
    UserNamespaceRange,
    UserNamespaces,
    parse_getsubids,
)
from pykubelet.kuberuntime.errors import ContainerConfigError
from pykubelet.kuberuntime.paths import PodDirs

SPACE = UserNamespaceRange(first=UNIT, count=3 * UNIT, block=UNIT)


def pod(uid: str, host_users: bool | None = False) -> Pod:
    return Pod(
        metadata=ObjectMeta(name=uid, namespace="default", uid=uid), spec=PodSpec(host_users=host_users)
    )


def first_id(spaces: UserNamespaces, uid: str) -> int:
    mappings = spaces.mappings_for(pod(uid))
    assert mappings is not None
    assert mappings.uids == mappings.gids
    return mappings.uids[0].host_id


def test_mappings_for_pod_block_unique_and_survives_restart(tmp_path: Path) -> None:
    dirs = PodDirs(tmp_path)
    spaces = UserNamespaces(dirs, SPACE, supported=lambda handler: True)
    assert [first_id(spaces, uid) for uid in "abc"] == [UNIT, 2 * UNIT, 3 * UNIT]
    with pytest.raises(ContainerConfigError, match="in use"):
        spaces.mappings_for(pod("d"))
    after_restart = UserNamespaces(dirs, SPACE, supported=lambda handler: True)
    assert first_id(after_restart, "b") == 2 * UNIT
    dirs.remove("b")
    assert first_id(after_restart, "d") == 2 * UNIT


def test_mappings_for_file_equals_upstream_format(tmp_path: Path) -> None:
    UserNamespaces(PodDirs(tmp_path), SPACE, supported=lambda handler: True).mappings_for(pod("a"))
    mapping = {"hostId": UNIT, "containerId": 0, "length": UNIT}
    written = json.loads((tmp_path / "pods" / "a" / "userns").read_text())
    assert written == {"uidMappings": [mapping], "gidMappings": [mapping]}


@pytest.mark.parametrize("host_users", [None, True])
def test_mappings_for_host_users_pod_returns_none(tmp_path: Path, host_users: bool | None) -> None:
    spaces = UserNamespaces(PodDirs(tmp_path), SPACE, supported=lambda handler: True)
    assert spaces.mappings_for(pod("a", host_users)) is None
    assert not (tmp_path / "pods").exists()


def test_mappings_for_unsupported_handler_raises_and_allocates_nothing(tmp_path: Path) -> None:
    spaces = UserNamespaces(PodDirs(tmp_path), SPACE, supported=lambda handler: handler == "kata")
    with pytest.raises(ContainerConfigError, match="hostUsers: false`, runtime does not support user namesp"):
        spaces.mappings_for(pod("a"))
    with pytest.raises(ContainerConfigError, match='RuntimeClass handler "gvisor" does not support user'):
        spaces.mappings_for(pod("a"), "gvisor")
    assert not (tmp_path / "pods").exists()
    assert spaces.mappings_for(pod("a"), "kata") is not None


@pytest.mark.parametrize(
    "content", ["", "{}", '{"uidMappings": [], "gidMappings": []}', '{"uidMappings": 3, "gidMappings": 3}']
)
def test_mappings_for_damaged_file_raises(tmp_path: Path, content: str) -> None:
    dirs = PodDirs(tmp_path)
    dirs.make("a")
    (dirs.pod("a") / "userns").write_text(content)
    with pytest.raises(ContainerConfigError, match="user namespace of pod a"):
        UserNamespaces(dirs, SPACE, supported=lambda handler: True).mappings_for(pod("a"))


@pytest.mark.parametrize(
    ("space", "says"),
    [
        (UserNamespaceRange(UNIT, 110 * UNIT, UNIT), None),
        (UserNamespaceRange(UNIT + 1, 110 * UNIT, UNIT), "multiple"),
        (UserNamespaceRange(0, 110 * UNIT, UNIT), "below"),
        (UserNamespaceRange(UNIT, 109 * UNIT, UNIT), "too few"),
    ],
)
def test_user_namespace_range_invalid_returns_problem(space: UserNamespaceRange, says: str | None) -> None:
    problem = space.problem(max_pods=110)
    assert problem is None if says is None else says in (problem or "")


def test_parse_getsubids_single_range_returned_otherwise_raises() -> None:
    assert parse_getsubids("0: kubelet 65536 7208960\n", UNIT) == UserNamespaceRange(65536, 7208960, UNIT)
    for text in ("", "0: kubelet 1 2\n1: kubelet 3 4\n", "0: kubelet x y\n"):
        with pytest.raises(ContainerConfigError):
            parse_getsubids(text, UNIT)
