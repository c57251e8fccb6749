"""The certificate folder: its layout is the reference's, and no moment to be killed at is a bad one."""

import os
import stat
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from pykubelet.apiserver.certificates.store import CertificateStore, StoreError, read_pair, write_file
from pykubelet.apiserver.certificates.x509 import Subject, certificates, read_request, subject
from tests.support.certs import Authority, Pair


@pytest.fixture(scope="module")
def pairs(authority: Authority) -> list[Pair]:
    return [authority.sign(f"/O=system:nodes/CN=system:node:{number}") for number in range(3)]


def stored(store: CertificateStore, pair: Pair) -> str:
    return store.update(pair.certificate.read_bytes(), pair.key.read_bytes()).subject.common_name


def name(store: CertificateStore) -> str:
    pair = store.current()
    return pair.subject.common_name if pair else ""


class Ticking:
    """A clock that goes on by a second each time it is looked at."""

    def __init__(self) -> None:
        self.now = datetime.now(UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


def test_certificate_store_update_has_upstream_layout(tmp_path: Path, pairs: list[Pair]) -> None:
    folder = tmp_path / "var" / "pki"
    moment = datetime.now(UTC)
    store = CertificateStore(folder, "kubelet-client", lambda: moment)
    assert store.current() is None
    store.recover()
    assert not folder.exists()
    assert stored(store, pairs[0]) == "system:node:0"
    link = folder / "kubelet-client-current.pem"
    target = (
        folder
        / f"kubelet-client-{time.strftime('%Y-%m-%d-%H-%M-%S', time.localtime(moment.timestamp()))}.pem"
    )
    assert link.readlink() == target
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert {path.name for path in folder.iterdir()} == {link.name, target.name}
    text = target.read_text()
    assert text.index("CERTIFICATE") < text.index("PRIVATE KEY")
    # Twice within a second: the same file, still as a whole.
    assert stored(store, pairs[1]) == name(store) == "system:node:1"
    current = store.current()
    assert current is not None
    assert current.certificate == current.key == store.current_path == link


def test_certificate_store_update_mismatched_pair_changes_nothing(tmp_path: Path, pairs: list[Pair]) -> None:
    store = CertificateStore(tmp_path, "kubelet-client", Ticking())
    stored(store, pairs[0])
    before = sorted(tmp_path.iterdir())
    for certificate, key in (
        (pairs[1].certificate.read_bytes(), pairs[0].key.read_bytes()),
        (b"", pairs[0].key.read_bytes()),
        (pairs[1].certificate.read_bytes(), b"nonsense"),
    ):
        with pytest.raises(StoreError) as caught:
            store.update(certificate, key)
        assert "\n" not in str(caught.value)
    assert sorted(tmp_path.iterdir()) == before
    assert name(store) == "system:node:0"


def test_certificate_store_update_replaces_plain_file_by_symlink(tmp_path: Path, pairs: list[Pair]) -> None:
    """As when somebody copied a folder without its links."""
    store = CertificateStore(tmp_path, "kubelet-client", Ticking())
    store.current_path.write_bytes(pairs[0].pem)
    assert name(store) == "system:node:0"
    stored(store, pairs[1])
    assert name(store) == "system:node:1"
    assert store.current_path.is_symlink()


def test_certificate_store_update_disk_full_changes_nothing(
    tmp_path: Path, pairs: list[Pair], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CertificateStore(tmp_path, "kubelet-client", Ticking())
    stored(store, pairs[0])
    before = sorted(tmp_path.iterdir())

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device", "the file")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match="the file cannot be written: No space left on device"):
        stored(store, pairs[1])
    monkeypatch.undo()
    assert sorted(tmp_path.iterdir()) == before
    assert name(store) == "system:node:0"


@pytest.mark.parametrize("content", [b"", b"-----BEGIN CERTIFICATE-----\nMIIB", None])
def test_certificate_store_recover_broken_current_uses_newest_valid(
    tmp_path: Path, pairs: list[Pair], authority: Authority, content: bytes | None
) -> None:
    store = CertificateStore(tmp_path, "kubelet-client", clock := Ticking())
    stored(store, authority.sign("/CN=expired", begins=-7200, ends=-3600))
    stored(store, pairs[0])
    stored(store, pairs[1])
    broken = store.current_path.resolve()
    broken.unlink() if content is None else broken.write_bytes(content)
    assert store.current() is None
    store.recover()
    assert name(store) == "system:node:0"
    clock.now += timedelta(days=2)
    store.current_path.unlink()
    store.recover()
    assert store.current() is None


def test_certificate_store_recover_interrupted_switch_is_completed(tmp_path: Path, pairs: list[Pair]) -> None:
    """The reference removes the old link before it renames the new one."""
    store = CertificateStore(tmp_path, "kubelet-client", Ticking())
    stored(store, pairs[0])
    store.current_path.rename(tmp_path / "kubelet-client-updated.pem")
    assert store.current() is None
    store.recover()
    assert name(store) == "system:node:0"
    assert not (tmp_path / "kubelet-client-updated.pem").is_symlink()


class Killed(BaseException):
    """The agent is gone at this very moment."""


CALLS = (
    (Path, "replace"),
    (Path, "symlink_to"),
    (Path, "unlink"),
    (os, "fsync"),
    (os, "open"),
    (os, "fchmod"),
)


@pytest.mark.parametrize("after", [False, True])
def test_certificate_store_update_killed_at_any_step_is_recoverable(
    tmp_path: Path, pairs: list[Pair], after: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached = 0
    for step in range(20):
        folder = tmp_path / str(step)
        clock = Ticking()
        store = CertificateStore(folder, "kubelet-client", clock)
        stored(store, pairs[0])
        with monkeypatch.context() as patched:
            left = iter(range(step, -1, -1))
            for owner, call in CALLS:
                patched.setattr(owner, call, dying(getattr(owner, call), left, after))
            try:
                stored(store, pairs[1])
                break
            except Killed:
                reached += 1
        again = CertificateStore(folder, "kubelet-client", clock)
        again.recover()
        assert name(again) in ("system:node:0", "system:node:1")
        stored(again, pairs[2])
        assert name(again) == "system:node:2"
        assert not list(folder.glob(".*"))
    assert reached > 7


def dying(call: Any, left: Iterator[int], after: bool) -> Any:
    def called(*args: Any, **options: Any) -> Any:
        last = next(left, -1) == 0
        if last and not after:
            raise Killed
        result = call(*args, **options)
        if last:
            raise Killed
        return result

    return called


def test_write_file_replaces_atomically_with_mode(tmp_path: Path) -> None:
    path = tmp_path / "new" / "kubeconfig"
    write_file(path, b"one", 0o600)
    before = path.stat()
    write_file(path, b"two", 0o600)
    assert path.read_bytes() == b"two"
    assert path.stat().st_ino != before.st_ino
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(path.parent.iterdir()) == [path]


def test_subject_returns_names_of_certificate(authority: Authority) -> None:
    pair = authority.sign(
        "/O=system:nodes/CN=system:node:one", "DNS:b.test,DNS:a.test,IP:10.0.0.1,IP:fd00::1,URI:spiffe://x"
    )
    found = subject(certificates(pair.certificate.read_bytes())[0])
    assert found == Subject(
        "system:node:one", ("system:nodes",), ("a.test", "b.test"), ("10.0.0.1", "fd00::1")
    )
    (der,) = certificates(pair.certificate.read_bytes())
    for cut in range(0, len(der), 5):
        with pytest.raises(ValueError):
            subject(der[:cut])
    assert subject(certificates(authority.certificate.read_bytes())[0]).common_name == "cluster"
    with pytest.raises(ValueError, match="no certificate request"):
        read_request(pair.certificate.read_bytes())


@pytest.mark.parametrize(
    ("had", "good"),
    [
        (Subject("n", ("o",), ("a",), ("1",)), True),
        (Subject("n", ("o", "p"), ("a", "b"), ("1", "2")), True),
        (Subject("m", ("o",), ("a",), ("1",)), False),
        (Subject("n", (), ("a",), ("1",)), False),
        (Subject("n", ("o",), ("b",), ("1",)), False),
        (Subject("n", ("o",), ("a",), ("2",)), False),
    ],
)
def test_subject_covers_requires_all_names(had: Subject, good: bool) -> None:
    assert had.covers(Subject("n", ("o",), ("a",), ("1",))) is good


def test_read_pair_mismatched_or_missing_file_raises(pairs: list[Pair], tmp_path: Path) -> None:
    assert read_pair(pairs[0].certificate, pairs[0].key).subject.common_name == "system:node:0"
    with pytest.raises(StoreError, match=r"absent cannot be read: No such file"):
        read_pair(tmp_path / "absent", pairs[0].key)
    with pytest.raises(StoreError, match="the key does not belong to the certificate"):
        read_pair(pairs[0].certificate, pairs[1].key)
