import asyncio
import errno
import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.linux.dbus import Message, Variant
from pykubelet.linux.systemd import Systemd, SystemdError, is_running, parse_version
from tests.unit.linux.bus import Peer, listening

JOB = "/org/freedesktop/systemd1/job/5"
Answer = Callable[[Peer, Message], None]


def job(result: str = "done", *, first: bool = False) -> Answer:
    """Take a job; with `first` its end is told before it is said which one it is."""

    def answer(peer: Peer, call: Message) -> None:
        ended = (7, JOB, call.body[0], result)
        peer.signal("JobRemoved", "uoss", 6, "/org/freedesktop/systemd1/job/4", "other.slice", "failed")
        if first:
            peer.signal("JobRemoved", "uoss", *ended)
        peer.answer(call, "o", JOB)
        if not first:
            peer.signal("UnitRemoved", "so", call.body[0], "/unit")
            peer.signal("JobRemoved", "uoss", *ended)

    return answer


def refusal(name: str) -> Answer:
    return lambda peer, call: peer.refuse(call, f"org.freedesktop.systemd1.{name}", f"{name} it is")


def vanish(peer: Peer, call: Message) -> None:
    peer.vanish()


@asynccontextmanager
async def systemd_at(path: Path, **answers: Answer) -> AsyncIterator[tuple[Systemd, list[tuple[str, Any]]]]:
    """A systemd on its own socket that answers these calls; gives also the calls that came."""
    calls: list[tuple[str, Any]] = []

    async def serve(peer: Peer) -> None:
        await peer.welcome()
        while True:
            call = await peer.read()
            if call.member == "Subscribe":
                peer.answer(call)
                continue
            calls.append((call.member, call.body))
            if call.member == "Get":
                peer.answer(call, "v", Variant("s", "252.38-1~deb12u1"))
            elif call.member in answers:
                answers[call.member](peer, call)
            else:
                peer.answer(call)

    async with listening(path, serve):
        yield Systemd(private=path, bus=path.with_name("none"), job_seconds=45), calls


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root speaks to systemd itself")


@needs_root
class TestSystemd:
    @pytest.mark.parametrize("first", [False, True])
    async def test_start_waits_for_own_job(self, tmp_path: Path, first: bool) -> None:
        wanted = [("MemoryMax", Variant("t", 5))]
        async with systemd_at(tmp_path / "s", StartTransientUnit=job(first=first)) as (manager, calls):
            await manager.start("a.slice", wanted)
        assert calls == [("StartTransientUnit", ("a.slice", "replace", wanted, []))]

    async def test_start_existing_unit_succeeds(self, tmp_path: Path) -> None:
        async with systemd_at(tmp_path / "s", StartTransientUnit=refusal("UnitExists")) as (manager, _):
            await manager.start("a.slice", [])

    async def test_start_job_fails_resets_failed_unit(self, tmp_path: Path) -> None:
        async with systemd_at(tmp_path / "s", StartTransientUnit=job("failed")) as (manager, calls):
            with pytest.raises(SystemdError, match=r"could not start a.slice: failed"):
                await manager.start("a.slice", [])
        assert calls[-1] == ("ResetFailedUnit", ("a.slice",))

    async def test_set_calls_set_unit_properties(self, tmp_path: Path) -> None:
        wanted = [("CPUWeight", Variant("t", 5))]
        async with systemd_at(tmp_path / "s") as (manager, calls):
            await manager.set("a.slice", wanted)
        assert calls == [("SetUnitProperties", ("a.slice", True, wanted))]

    async def test_stop_waits_for_job_and_resets_failed_unit(self, tmp_path: Path) -> None:
        async with systemd_at(tmp_path / "s", StopUnit=job(), ResetFailedUnit=refusal("NoSuchUnit")) as (
            manager,
            calls,
        ):
            await manager.stop("a.slice")
        assert calls == [("StopUnit", ("a.slice", "replace")), ("ResetFailedUnit", ("a.slice",))]

    async def test_stop_missing_unit_succeeds(self, tmp_path: Path) -> None:
        async with systemd_at(tmp_path / "s", StopUnit=refusal("NoSuchUnit")) as (manager, _):
            await manager.stop("a.slice")

    async def test_version_is_requested_once(self, tmp_path: Path) -> None:
        async with systemd_at(tmp_path / "s") as (manager, calls):
            assert [await manager.version(), await manager.version()] == [252, 252]
        assert len(calls) == 1

    async def test_set_after_systemd_restart_reconnects(self, tmp_path: Path) -> None:
        path = tmp_path / "s"
        async with systemd_at(path) as (manager, _):
            await manager.set("a.slice", [])
        path.unlink(missing_ok=True)
        with pytest.raises(SystemdError, match=r"about a.slice"):
            await manager.set("a.slice", [])
        async with systemd_at(path):
            await manager.set("a.slice", [])

    @pytest.mark.parametrize(
        ("answer", "told", "number"),
        [
            (refusal("Broken"), "systemd, about a.slice: StartTransientUnit: Broken it is", errno.EREMOTEIO),
            (vanish, "closed the connection", errno.ECONNRESET),
            (
                lambda peer, call: peer.answer(call, "o", JOB),
                "StartTransientUnit is not done",
                errno.ETIMEDOUT,
            ),
        ],
    )
    async def test_start_dbus_failure_raises_with_errno(
        self, tmp_path: Path, answer: Answer, told: str, number: int
    ) -> None:
        async with systemd_at(tmp_path / "s", StartTransientUnit=answer) as (manager, _):
            manager._job_seconds = 0.1
            with pytest.raises(SystemdError, match=told) as failed:
                await manager.start("a.slice", [])
        assert failed.value.errno == number

    async def test_start_connection_closed_during_job_raises(self, tmp_path: Path) -> None:
        def leave(peer: Peer, call: Message) -> None:
            peer.answer(call, "o", JOB)
            asyncio.get_running_loop().call_later(0.05, peer.vanish)

        async with systemd_at(tmp_path / "s", StartTransientUnit=leave) as (manager, _):
            with pytest.raises(SystemdError, match="closed the connection"):
                await manager.start("a.slice", [])


async def test_systemd_unreachable_raises(tmp_path: Path) -> None:
    with pytest.raises(SystemdError, match=r"systemd, about a.slice: .*/bus cannot be reached"):
        await Systemd(private=tmp_path / "private", bus=tmp_path / "bus").stop("a.slice")


@pytest.mark.parametrize(
    ("text", "number"), [("252.38-1~deb12u1", 252), ("v245.4-1.fc32", 245), ("239", 239), ("", 0), ("x", 0)]
)
def test_parse_version_returns_major_number(text: str, number: int) -> None:
    assert parse_version(text) == number


def test_is_running_follows_systemd_directory(tmp_path: Path) -> None:
    folder = tmp_path / "system"
    assert not is_running(folder)
    folder.mkdir()
    assert is_running(folder)
