import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.kuberuntime.paths import (
    attempts_in_logs,
    container_id_of_link,
    container_log_path,
    legacy_log_link,
    pod_log_dir,
    pod_uid_of_log_dir,
)
from pykubelet.podconfig.pod_history import field_of
from tests.support.containers import make_container, make_pod

ID = "0123456789abcdef" * 4


@pytest.mark.parametrize("root", ["/var/log/pods", "/var/log/pods/"])
def test_pod_log_dir_path_and_uid_roundtrip(root: str) -> None:
    folder = pod_log_dir(root, "shop", "web", "u-1")
    assert folder == "/var/log/pods/shop_web_u-1"
    assert pod_uid_of_log_dir(folder.rpartition("/")[2]) == "u-1"
    assert pod_uid_of_log_dir("u-1") == "u-1"
    assert container_log_path("main", 3) == "main/3.log"


def test_legacy_log_link_container_id_roundtrips() -> None:
    link = legacy_log_link("web", "shop", "main", ID)
    assert link == f"web_shop_main-{ID}.log"
    assert container_id_of_link(link) == ID


@pytest.mark.parametrize("name", ["", "x.log", "a-b.log", f"a-{ID}", f"a-{ID}.log.1", "README"])
def test_container_id_of_link_foreign_file_returns_none(name: str) -> None:
    assert container_id_of_link(name) is None


@given(st.from_regex(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", fullmatch=True), st.integers(1, 63))
def test_legacy_log_link_any_pod_name_fits_255_characters(pod: str, length: int) -> None:
    link = legacy_log_link(pod, "n" * length, "c", ID)
    assert len(link) <= 255
    assert link.endswith(".log")
    found = container_id_of_link(link)
    if len(pod) + length < 180:
        assert found is not None
        assert ID.startswith(found)


@pytest.mark.parametrize(
    ("files", "attempts"),
    [
        ([], 0),
        (["0.log"], 1),
        (["0.log", "2.log", "1.log"], 3),
        (["0.log.20240101-000000", "0.log.20240101-000000.gz"], 1),
        (["x.log", "-1.log", "1.txt", "99999999999999999999.log", "٣.log"], 0),
    ],
)
def test_attempts_in_logs_file_names_return_count(files: list[str], attempts: int) -> None:
    assert attempts_in_logs(files) == attempts


def test_field_of_container_returns_event_field_path() -> None:
    pod = make_pod(
        make_container("main"),
        init_containers=[make_container("first")],
        ephemeral_containers=[make_container("debug")],
    )
    assert field_of(pod, "main") == "spec.containers{main}"
    assert field_of(pod, "first") == "spec.initContainers{first}"
    assert field_of(pod, "debug") == "spec.ephemeralContainers{debug}"
    assert field_of(pod, "absent") == ""
