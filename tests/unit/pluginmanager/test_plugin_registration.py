"""Plugins that register over real sockets: good ones, and those that hang, die, refuse or come twice."""

import asyncio
import socket
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from pykubelet.pluginmanager import registration as plugin_registration
from pykubelet.pluginmanager import registration as plugin_watch
from pykubelet.pluginmanager import registration_pb2 as pb
from pykubelet.pluginmanager.client import PluginError, call_plugin
from pykubelet.pluginmanager.registration import (
    Plugin,
    PluginRegistration,
    RegistrationRefused,
    scan_sockets,
    watch_sockets,
)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A registration folder with a short path, not there yet."""
    with tempfile.TemporaryDirectory(prefix="pyk-", dir="/tmp") as parent:
        yield Path(parent) / "plugins_registry"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin_registration, "FIRST_DELAY_SECONDS", 0.02)
    monkeypatch.setattr(plugin_registration, "MAX_DELAY_SECONDS", 0.1)


class PluginServer:
    """A plugin's side of the registration."""

    def __init__(self, path: Path, name: str = "one", kind: str = "Test", endpoint: str = "/e.sock") -> None:
        self.path = path
        self.info = pb.PluginInfo(type=kind, name=name, endpoint=endpoint, supported_versions=["1.0.0"])
        self.told: list[tuple[bool, str]] = []
        self.before_info: Callable[[], Awaitable[None]] | None = None
        self.before_told: Callable[[], Awaitable[None]] | None = None
        self._server: Any = None

    async def start(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._server = grpc.aio.server()
        methods = {
            "GetInfo": _method(self._get_info, pb.InfoRequest),
            "NotifyRegistrationStatus": _method(self._notify, pb.RegistrationStatus),
        }
        handler = grpc.method_handlers_generic_handler("pluginregistration.Registration", methods)
        self._server.add_generic_rpc_handlers((handler,))
        self._server.add_insecure_port(f"unix:{self.path}")
        await self._server.start()

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def leave(self) -> None:
        await self.stop()
        self.path.unlink(missing_ok=True)

    async def _get_info(self, request: Any, context: Any) -> pb.PluginInfo:
        if self.before_info is not None:
            await self.before_info()
        return self.info

    async def _notify(self, request: Any, context: Any) -> pb.RegistrationStatusResponse:
        if self.before_told is not None:
            await self.before_told()
        self.told.append((request.plugin_registered, request.error))
        return pb.RegistrationStatusResponse()


def _method(serve: Any, request: Any) -> Any:
    return grpc.unary_unary_rpc_method_handler(
        serve,
        request_deserializer=request.FromString,
        response_serializer=lambda answer: answer.SerializeToString(),
    )


class RecordingHandler:
    """A handler that writes down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.there: set[str] = set()
        self.refuse: str = ""
        self.hold: asyncio.Event | None = None

    def validate(self, plugin: Plugin) -> None:
        if plugin.name == "bad":
            raise RegistrationRefused("a bad name")

    async def register(self, plugin: Plugin) -> None:
        self.events.append(f"register {plugin.name} {plugin.endpoint}")
        if self.hold is not None:
            await self.hold.wait()
        if self.refuse:
            raise RegistrationRefused(self.refuse)
        self.there.add(plugin.name)

    async def deregister(self, plugin: Plugin) -> None:
        self.events.append(f"deregister {plugin.name}")
        self.there.discard(plugin.name)


@asynccontextmanager
async def registering(folder: Path, handler: RecordingHandler) -> AsyncIterator[None]:
    task = asyncio.create_task(PluginRegistration(folder, {"Test": handler}).run())
    try:
        yield
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def until(what: str, look: Callable[[], object], seconds: float = 45) -> None:
    async with asyncio.timeout(seconds):
        while not look():
            await asyncio.sleep(0.01)


async def test_plugin_registration_socket_added_and_removed_is_followed(folder: Path) -> None:
    handler, plugin = RecordingHandler(), PluginServer(folder / "one.sock")
    async with registering(folder, handler):
        await until("the folder", folder.is_dir)
        await plugin.start()
        await until("told", lambda: plugin.told)
        assert plugin.told == [(True, "")]
        assert handler.events == ["register one /e.sock"]
        await plugin.leave()
        await until("gone", lambda: not handler.there)
    assert handler.events == ["register one /e.sock", "deregister one"]


async def test_plugin_registration_existing_sockets_in_subdirectories_registered(folder: Path) -> None:
    handler = RecordingHandler()
    plugins = [
        PluginServer(folder / "one.sock"),
        PluginServer(folder / "deep" / "two.sock", "two", endpoint=""),
    ]
    hidden = PluginServer(folder / ".hidden.sock", "hidden")
    for plugin in (*plugins, hidden):
        await plugin.start()
    (folder / "file.sock").write_text("no socket")
    async with registering(folder, handler):
        await until("both", lambda: all(plugin.told for plugin in plugins))
    assert handler.there == {"one", "two"}
    # Without an endpoint of its own, a plugin serves where it registers.
    assert f"register two {folder}/deep/two.sock" in handler.events
    # The end of the agent is not the end of its plugins.
    assert not [event for event in handler.events if event.startswith("deregister")]
    for plugin in (*plugins, hidden):
        await plugin.leave()


async def test_plugin_registration_subdirectory_created_later_is_watched(folder: Path) -> None:
    handler, plugin = RecordingHandler(), PluginServer(folder / "late" / "one.sock")
    async with registering(folder, handler):
        await until("the folder", folder.is_dir)
        await plugin.start()
        await until("told", lambda: plugin.told)
    await plugin.leave()


async def test_plugin_registration_get_info_hangs_others_register(folder: Path) -> None:
    handler, hanging, good = (
        RecordingHandler(),
        PluginServer(folder / "a.sock", "a"),
        PluginServer(folder / "b.sock", "b"),
    )
    released = asyncio.Event()

    async def hang() -> None:
        await released.wait()

    hanging.before_info = hang
    await hanging.start()
    async with registering(folder, handler):
        await until("the folder", folder.is_dir)
        await good.start()
        await until("the good one", lambda: good.told)
        assert not hanging.told
        released.set()
        await until("it answers late, and is taken", lambda: hanging.told == [(True, "")])
    await hanging.leave()
    await good.leave()


async def test_plugin_registration_socket_not_listening_is_retried(folder: Path) -> None:
    """A file that nobody listens at, until somebody does at the same path."""
    handler, plugin = RecordingHandler(), PluginServer(folder / "one.sock")
    await plugin.start()
    await plugin.stop()
    plugin.path.unlink(missing_ok=True)
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(plugin.path))
    dead.close()
    async with registering(folder, handler):
        await asyncio.sleep(0.2)
        await plugin.start()
        await until("told", lambda: plugin.told)
    # Twice, if it was reached before its socket was seen to be a new one.
    assert set(plugin.told) == {(True, "")}
    await plugin.leave()


@pytest.mark.parametrize(
    ("name", "kind", "refuse", "said"),
    [
        ("bad", "Test", "", "RegisterPlugin error -- plugin validation failed with err: a bad name"),
        ("one", "Test", "no room", "RegisterPlugin error -- plugin registration failed with err: no room"),
        ("one", "Odd", "", "RegisterPlugin error -- no handler registered for plugin type: Odd at socket {}"),
    ],
)
async def test_plugin_registration_rejected_notifies_reason_and_retries(
    folder: Path, name: str, kind: str, refuse: str, said: str
) -> None:
    handler, plugin = RecordingHandler(), PluginServer(folder / "x.sock", name, kind)
    handler.refuse = refuse
    await plugin.start()
    async with registering(folder, handler):
        await until("refused, more than once", lambda: len(plugin.told) > 1)
        assert plugin.told[0] == (False, said.format(plugin.path))
        assert not handler.there
        if refuse:
            handler.refuse = ""
            await until("taken in the end", lambda: plugin.told[-1] == (True, ""))
            assert handler.there == {"one"}
    await plugin.leave()


async def test_plugin_registration_notify_fails_deregisters_and_retries(folder: Path) -> None:
    handler, plugin = RecordingHandler(), PluginServer(folder / "one.sock")
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        if tries < 3:
            raise RuntimeError("not now")

    plugin.before_told = fail
    await plugin.start()
    async with registering(folder, handler):
        await until("told in the end", lambda: plugin.told == [(True, "")])
    assert handler.events == ["register one /e.sock", "deregister one"] * 2 + ["register one /e.sock"]
    await plugin.leave()


async def test_plugin_registration_socket_removed_during_register_deregisters(folder: Path) -> None:
    handler, plugin = RecordingHandler(), PluginServer(folder / "one.sock")
    handler.hold = asyncio.Event()
    await plugin.start()
    async with registering(folder, handler):
        await until("registering", lambda: handler.events)
        await plugin.leave()
        await until("seen off", lambda: "deregister one" in handler.events)
        assert not handler.there


async def test_plugin_registration_plugin_restarted_registers_again(folder: Path) -> None:
    handler, first = RecordingHandler(), PluginServer(folder / "one.sock")
    await first.start()
    async with registering(folder, handler):
        await until("the first", lambda: first.told)
        second = PluginServer(folder / "one.sock", endpoint="/other.sock")
        await second.start()
        await until("the second", lambda: second.told)
        await until("in order", lambda: len(handler.events) == 3)
    assert handler.events == ["register one /e.sock", "deregister one", "register one /other.sock"]
    await first.stop()
    await second.leave()


async def test_scan_sockets_mode_changed_is_same_socket(folder: Path) -> None:
    plugin = PluginServer(folder / "one.sock")
    await plugin.start()
    before = scan_sockets(folder)
    plugin.path.chmod(0o600)
    assert scan_sockets(folder) == before
    await plugin.leave()


async def test_watch_sockets_directory_removed_is_recreated(folder: Path) -> None:
    looks = watch_sockets(folder)
    assert await anext(looks) == {}
    plugin = PluginServer(folder / "one.sock")
    await plugin.start()
    assert list(await anext(looks)) == [plugin.path]
    await plugin.leave()
    assert await anext(looks) == {}
    folder.rmdir()
    following = asyncio.ensure_future(anext(looks))
    await until("made anew", folder.is_dir)
    await plugin.start()
    assert list(await asyncio.wait_for(following, 45)) == [plugin.path]
    await plugin.leave()
    await looks.aclose()


async def test_call_plugin_dead_or_silent_peer_raises_status_code(folder: Path) -> None:
    folder.mkdir(parents=True)
    path, method = folder / "x.sock", "/pluginregistration.Registration/GetInfo"

    async def call(**more: float) -> pb.PluginInfo:
        return await call_plugin(str(path), method, pb.InfoRequest(), pb.PluginInfo, timeout=1, **more)

    with pytest.raises(PluginError) as failed:
        await call()
    assert (failed.value.code, failed.value.is_final) == ("Unavailable", False)
    with pytest.raises(PluginError, match=r"nobody has answered at .*x.sock for 0.1 seconds"):
        await call(connect_timeout=0.1)
    plugin = PluginServer(path)
    forever = asyncio.Event()

    async def hang() -> None:
        await forever.wait()

    plugin.before_info = hang
    await plugin.start()
    with pytest.raises(PluginError) as failed:
        await call(connect_timeout=30)
    assert str(failed.value) == "rpc error: code = DeadlineExceeded desc = context deadline exceeded"
    assert not failed.value.is_final
    with pytest.raises(PluginError) as failed:
        await call_plugin(str(path), "/no/such", pb.InfoRequest(), pb.PluginInfo, timeout=30)
    assert (failed.value.code, failed.value.is_final) == ("Unimplemented", True)
    forever.set()
    await plugin.leave()
    with pytest.raises(PluginError, match="too long"):
        await call_plugin(f"/{'x' * 200}", method, pb.InfoRequest(), pb.PluginInfo, timeout=1)


async def test_watch_sockets_directory_is_read_in_worker_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Verify that a plugin which fills the directory with files does not hold up pods."""
    threads = set()

    def recorded(folder: Path, watcher: Any = None) -> dict[Path, Any]:
        threads.add(threading.current_thread())
        return scan_sockets(folder, watcher)

    monkeypatch.setattr(plugin_watch, "scan_sockets", recorded)
    async with aclosing(watch_sockets(tmp_path)) as looks:
        assert await anext(looks) == {}
    assert threads
    assert threading.current_thread() not in threads
