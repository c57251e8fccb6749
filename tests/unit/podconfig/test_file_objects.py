"""ConfigMaps and Secrets in the manifests folder, from the file to whoever serves them."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from pykubelet.api.core import ConfigMap
from pykubelet.api.pod import Pod
from pykubelet.config.errors import Problem
from pykubelet.objects.base import ObjectNotFound
from pykubelet.podconfig.file_source import FileSource
from pykubelet.podconfig.local_objects import LocalObject, LocalObjects, title
from tests.support.waiting import until
from tests.unit.podconfig.making import NODE, Heard, manifest, static
from tests.unit.podconfig.test_file_source import RARELY, put

MAP = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s}\ndata: {key: %s}\n"
SECRET = "apiVersion: v1\nkind: Secret\nmetadata: {name: %s}\nstringData: {key: hidden}\n"
WARNING = "is readable by other users"


@asynccontextmanager
async def watching(path: Path, objects: LocalObjects | None) -> AsyncIterator[Heard]:
    """A source that runs, after its first report; without objects it is a cluster's."""
    heard = Heard()
    serve = objects.offer if objects is not None else None
    task = asyncio.ensure_future(FileSource(path, RARELY, NODE, heard, serve=serve).run())
    try:
        await until(lambda: bool(heard.sets))
        yield heard
        assert not task.done(), task.exception()
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "manifests"
    folder.mkdir()
    return folder


@pytest.fixture
def objects() -> LocalObjects:
    return LocalObjects()


async def value(objects: LocalObjects, name: str = "c") -> str:
    try:
        found: ConfigMap = await objects.config_map(static(), name)
    except ObjectNotFound:
        return ""
    return found.data["key"]


def warnings(caplog: pytest.LogCaptureFixture, text: str) -> list[str]:
    return [
        f"{record.getMessage()} {record.__dict__['klog_keys']}"
        for record in caplog.records
        if text in record.getMessage()
    ]


async def test_file_source_serves_objects_before_emitting_pods(folder: Path) -> None:
    calls: list[list[str]] = []

    def serve(given: Iterable[tuple[str, LocalObject]]) -> list[Problem]:
        calls.append([title(found) for _, found in given])
        return []

    def emit(source: str, pods: list[Pod], problems: list[Problem]) -> None:
        calls.append([pod.metadata.name for pod in pods])

    pod = manifest("web", volumes=[{"name": "v", "configMap": {"name": "c"}}])
    (folder / "all.yaml").write_text(f"{pod}---\n{MAP % ('c', 'one')}")
    task = asyncio.ensure_future(FileSource(folder, RARELY, NODE, emit, serve=serve).run())
    try:
        await until(lambda: len(calls) == 2)
        assert calls == [["configMap default/c"], ["web-node-1"]]
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_file_source_changed_object_is_served_and_invalid_file_keeps_old(
    folder: Path, objects: LocalObjects
) -> None:
    async with watching(folder, objects) as heard:
        assert await value(objects) == ""
        (folder / "b.yaml").write_text(MAP % ("c", "one"))
        (folder / "web.yaml").write_text(manifest("web"))
        await until(lambda: heard.names == ["web-node-1"])
        await until_value(objects, "one")
        put(folder / "b.yaml", MAP % ("c", "two"))
        await until_value(objects, "two")
        put(folder / "b.yaml", MAP % ("c", "3"))
        await until(lambda: bool(heard.problems))
        assert heard.problems == [f"{folder}/b.yaml: ConfigMap 'c': data.key: must be text: put it in quotes"]
        assert await value(objects) == "two"
        assert heard.names == ["web-node-1"], "pods of other files go on"
        put(folder / "b.yaml", MAP % ("c", "four"))
        await until_value(objects, "four")
        put(folder / "a.yaml", MAP % ("c", "five"))
        await until_value(objects, "five")
        assert heard.problems == [
            f"{folder}/b.yaml: configMap default/c is already in {folder}/a.yaml: rename one, or remove it"
        ]
        (folder / "a.yaml").unlink()
        await until_value(objects, "four")
        (folder / "b.yaml").unlink()
        await until_value(objects, "")
        assert heard.problems == []


async def until_value(objects: LocalObjects, wanted: str) -> None:
    for _ in range(15_000):
        if await value(objects) == wanted:
            return
        await asyncio.sleep(0.002)
    raise AssertionError(f"it is {await value(objects)!r} and not {wanted!r}")


async def test_file_source_immutable_object_changed_reports_problem(
    folder: Path, objects: LocalObjects
) -> None:
    (folder / "a.yaml").write_text(MAP % ("c", "one") + "immutable: true\n")
    async with watching(folder, objects) as heard:
        put(folder / "a.yaml", MAP % ("c", "two"))
        await until(lambda: bool(heard.problems))
        assert "is immutable and has changed" in heard.problems[0]
        assert await value(objects) == "one"


async def test_file_source_pod_with_service_account_token_is_rejected(
    folder: Path, objects: LocalObjects
) -> None:
    token = {"sources": [{"serviceAccountToken": {"path": "token"}}]}
    (folder / "a.yaml").write_text(manifest("a", volumes=[{"name": "v", "secret": {"secretName": "s"}}]))
    (folder / "b.yaml").write_text(manifest("b", volumes=[{"name": "v", "projected": token}]))
    async with watching(folder, objects) as heard:
        assert heard.names == ["a-node-1"]
        assert "refers to serviceaccounts, which only an API server has" in heard.problems[0]


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
async def test_file_source_secret_readable_by_others_logs_warning_once_per_change(
    folder: Path, objects: LocalObjects, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    file = folder / "s.yaml"
    file.write_text(SECRET % "s")
    file.chmod(mode)
    (folder / "c.yaml").write_text(MAP % ("c", "one"))
    (folder / "c.yaml").chmod(0o644)
    async with watching(folder, objects) as heard:
        (told,) = warnings(caplog, WARNING)
        assert f"chmod 600 {file}" in told
        for n in range(3):
            put(folder / "web.yaml", manifest("web", hostname=f"h{n}"))
            await until(heard.hostname_is(f"h{n}"))
        assert len(warnings(caplog, WARNING)) == 1
        file.write_text(SECRET % "s" + "immutable: true\n")
        await until(lambda: len(warnings(caplog, WARNING)) == 2)
        file.chmod(0o600)
        put(folder / "web.yaml", manifest("web", hostname="last"))
        await until(heard.hostname_is("last"))
        assert len(warnings(caplog, WARNING)) == 2
        file.chmod(mode)
        await until(lambda: len(warnings(caplog, WARNING)) == 3)


async def test_file_source_secret_mode_600_logs_no_warning(
    folder: Path, objects: LocalObjects, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "s.yaml").write_text(SECRET % "s")
    (folder / "s.yaml").chmod(0o600)
    async with watching(folder, objects):
        assert warnings(caplog, WARNING) == []
    assert "hidden" not in str([record.__dict__ for record in caplog.records])


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to give a file away")
async def test_file_source_secret_owned_by_other_user_logs_warning(
    folder: Path, objects: LocalObjects, caplog: pytest.LogCaptureFixture
) -> None:
    file = folder / "s.yaml"
    file.write_text(SECRET % "s")
    file.chmod(0o600)
    os.chown(file, 4242, 4242)
    async with watching(folder, objects):
        assert f"chown root {file}" in warnings(caplog, WARNING)[0]


async def test_file_source_objects_with_api_server_ignored_and_warned_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (folder / "a.yaml").write_text(MAP % ("c", "1"))  # not even a good one
    (folder / "b.yaml").write_text(manifest("web") + "---\n" + SECRET % "s")
    (folder / "b.yaml").chmod(0o600)
    (folder / "c.yaml").write_text(manifest("c", volumes=[{"name": "v", "configMap": {"name": "c"}}]))
    async with watching(folder, None) as heard:
        assert heard.names == ["web-node-1"]
        assert ["refers to configmaps" in problem for problem in heard.problems] == [True]
        put(folder / "a.yaml", MAP % ("c", "two"))
        put(folder / "web.yaml", manifest("other"))
        await until(lambda: len(heard.names) == 2)
    (told,) = warnings(caplog, "Ignored ConfigMaps and Secrets in manifests")
    assert "through the API server" in told
