import asyncio
import itertools
import os
import shutil
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.duration import Duration
from pykubelet.linux import inotify
from pykubelet.podconfig import file_source
from pykubelet.podconfig import file_source as path_watch
from pykubelet.podconfig.file_source import DirectorySnapshot, FileSource, directories_to_watch
from pykubelet.podconfig.file_source import scan as folder_look
from tests.support.waiting import until
from tests.unit.podconfig.making import NODE, Heard, manifest

RARELY = Duration.from_seconds(60)


@asynccontextmanager
async def watching(path: Path, period: Duration = RARELY) -> AsyncIterator[Heard]:
    """A source that runs, after its first report."""
    heard = Heard()
    task = asyncio.ensure_future(FileSource(path, period, NODE, heard).run())
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


def put(file: Path, text: str) -> None:
    """Replace a file at once, as careful editors do."""
    new = file.with_name(f".{file.name}.new")
    new.write_text(text)
    new.rename(file)


async def test_file_source_existing_files_reported_in_order(folder: Path) -> None:
    for name in "cab":
        (folder / f"{name}.yaml").write_text(manifest(name))
    async with watching(folder) as heard:
        assert heard.source == "file"
        assert heard.names == ["a-node-1", "b-node-1", "c-node-1"]
        assert heard.problems == []


async def test_file_source_empty_directory_reports_no_pods(folder: Path) -> None:
    async with watching(folder) as heard:
        assert heard.sets == [([], [])]


async def test_file_source_file_created_edited_deleted_is_reported(folder: Path) -> None:
    async with watching(folder) as heard:
        (folder / "web.yaml").write_text(manifest("web"))
        # Nobody waits for the next look, which is a minute away.
        assert await until(lambda: heard.names == ["web-node-1"]) < 10
        first = heard.sets[-1][0][0].uid
        put(folder / "web.yaml", manifest("web", hostNetwork=True))
        await until(lambda: heard.sets[-1][0][0].uid != first)
        assert heard.sets[-1][0][0].spec.host_network
        (folder / "web.yaml").write_text(manifest("web"))
        await until(lambda: heard.sets[-1][0][0].uid == first)
        (folder / "web.yaml").unlink()
        await until(lambda: heard.names == [])
        assert len(heard.sets) == 5
        assert all(not problems for _, problems in heard.sets)


async def test_file_source_recreated_file_removes_and_adds_its_pods(folder: Path) -> None:
    (folder / "other.yaml").write_text(manifest("other"))
    (folder / "web.yaml").write_text(manifest("web"))
    async with watching(folder) as heard:
        before = heard.sets[-1][0][1]
        (folder / "web.yaml").unlink()
        (folder / "web.yaml").write_text(manifest("web"))
        await until(lambda: len(heard.sets) >= 3)
        names = [[pod.metadata.name for pod in pods] for pods, _ in heard.sets]
        assert names == [["other-node-1", "web-node-1"], ["other-node-1"], ["other-node-1", "web-node-1"]]
        assert heard.sets[-1][0][1].uid == before.uid
        # Moved away and back is the same, for all that is in it.
        (folder / "web.yaml").rename(folder / ".web")
        (folder / ".web").rename(folder / "web.yaml")
        await until(lambda: len(heard.sets) >= 5)
        assert [len(pods) for pods, _ in heard.sets] == [2, 1, 2, 1, 2]


@pytest.mark.parametrize("edited", [True, False])
async def test_file_source_file_recreated_during_scan_adds_its_pods_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, edited: bool
) -> None:
    """Verify that a removal that inotify reports after its file was read again restarts no pod twice."""
    file, late = folder / "web.yaml", list[str]()
    file.write_text(manifest("web"))

    def scan(path: Path, *arguments: Any) -> DirectorySnapshot:
        if late:
            file.unlink()
            file.write_text(late.pop())
        return folder_look(path, *arguments)

    monkeypatch.setattr(file_source, "scan", scan)
    async with watching(folder) as heard:
        before = heard.sets[-1][0][0].uid
        late.append(manifest("web", hostNetwork=True) if edited else manifest("web"))
        (folder / "more.yaml").write_text(manifest("more"))
        await until(lambda: len(heard.sets) >= 3)
        await asyncio.sleep(0.3)  # for what must not be reported
        after = [[pod.uid for pod in pods if pod.metadata.name == "web-node-1"] for pods, _ in heard.sets]
        assert (after[-1] != [before]) == edited
        # Reported as removed, and then as added, once.
        runs = [uids for uids, _ in itertools.groupby(after)]
        assert runs == [[before], [], after[-1]]


async def test_file_source_replaced_file_keeps_its_unchanged_pods(folder: Path) -> None:
    """Verify that what careful editors do, to move a file over another, restarts nothing."""
    (folder / "web.yaml").write_text(manifest("web"))
    async with watching(folder) as heard:
        for _ in range(3):
            put(folder / "web.yaml", manifest("web"))
        put(folder / "more.yaml", manifest("more"))
        await until(lambda: heard.names == ["more-node-1", "web-node-1"])
        assert all("web-node-1" in [pod.metadata.name for pod in pods] for pods, _ in heard.sets)


async def test_file_source_burst_of_files_is_one_report(folder: Path) -> None:
    async with watching(folder) as heard:
        begin = time.monotonic()
        for n in range(20):
            (folder / f"p{n:02}.yaml").write_text(manifest(f"p{n:02}"))
        written = time.monotonic() - begin
        took = await until(lambda: len(heard.sets) > 1)
        if written < 0.05:  # Otherwise the machine was too busy for this to be one burst.
            assert len(heard.names) == 20
            # Parsing twenty manifests takes its time on a busy machine; waiting must not.
            assert took < 25
        await until(lambda: len(heard.names) == 20)


async def test_file_source_small_change_reported_within_100_ms(folder: Path) -> None:
    async with watching(folder) as heard:
        took: list[float] = []
        # Many tries, because the machine may be busy with something else.
        while min(took, default=1.0) >= 0.1 and len(took) < 50:
            name = f"h{len(took)}"
            put(folder / "web.yaml", manifest("web", hostname=name))
            took.append(await until(heard.hostname_is(name)))
        assert min(took) < 0.1


async def test_file_source_ignores_hidden_files_directories_and_pipes(folder: Path) -> None:
    (folder / ".hidden.yaml").write_text(manifest("hidden"))
    (folder / "below").mkdir()
    (folder / "below" / "a.yaml").write_text(manifest("below"))
    os.mkfifo(folder / "pipe")
    (folder / "gone").symlink_to(folder / "nowhere")
    (folder / "good.yaml").write_text(manifest("good"))
    async with watching(folder) as heard:
        assert heard.names == ["good-node-1"]
        assert heard.problems == [
            f"{folder}/below: is a folder: only files beside it are read",
            f"{folder}/gone: is a link to a file that does not exist",
            f"{folder}/pipe: cannot be read: not a regular file",
        ]


@pytest.mark.parametrize("bad", ["kind: [", "", manifest("web", restartPolicy="x"), "a: 1"])
async def test_file_source_file_becomes_invalid_keeps_pods_until_removed(folder: Path, bad: str) -> None:
    file = folder / "web.yaml"
    file.write_text(manifest("web"))
    async with watching(folder) as heard:
        good = heard.sets[-1][0]
        put(file, bad)
        os.utime(file, (1, 1))  # An empty file counts as finished only when it is not quite new.
        await until(lambda: bool(heard.problems))
        assert heard.sets[-1][0] == good
        assert heard.problems[0].startswith(f"{file}: ")
        put(file, manifest("web"))
        await until(lambda: not heard.problems)
        assert [pod.uid for pod in heard.sets[-1][0]] == [pod.uid for pod in good]
        put(file, bad)
        file.unlink()
        await until(lambda: heard.names == [])


async def test_file_source_file_never_valid_has_no_pods(folder: Path) -> None:
    (folder / "a.yaml").write_text("kind: [")
    (folder / "b.yaml").write_text(manifest("b"))
    async with watching(folder) as heard:
        assert heard.names == ["b-node-1"]
        assert len(heard.problems) == 1


async def test_file_source_problem_is_logged_once(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    (folder / "a.yaml").write_text("kind: [")
    async with watching(folder, Duration.from_seconds(0.1)) as heard:
        for n in range(3):
            put(folder / "b.yaml", manifest("b", hostname=f"h{n}"))
            await until(heard.hostname_is(f"h{n}"))
        await asyncio.sleep(0.3)
    assert len([record for record in caplog.records if "Failed to use" in record.message]) == 1


async def test_file_source_file_open_for_writing_is_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What has been written so far is a good pod by itself, but not the one that is meant."""
    # The writer may be stopped for longer than those who never close are waited for.
    monkeypatch.setattr(path_watch, "SETTLED_SECONDS", 300)
    file = folder / "web.yaml"
    text = manifest("web")
    assert text.endswith("name: web\nspec:\n  containers:\n  - image: busybox:1.35\n    name: main\n")
    async with watching(folder, Duration.from_seconds(0.1)) as heard:
        with file.open("w") as writer:
            writer.write(text)
            writer.flush()
            await asyncio.sleep(0.3)
            assert heard.names == []
            writer.write("  hostNetwork: true\n")
        await until(lambda: heard.names == ["web-node-1"])
        assert heard.sets[-1][0][0].spec.host_network
        assert len(heard.sets) <= 3


async def test_file_source_writer_never_closes_is_read_after_timeout(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(path_watch, "SETTLED_SECONDS", 0.2)
    async with watching(folder) as heard:
        with (folder / "web.yaml").open("w") as writer:
            writer.write(manifest("web"))
            writer.flush()
            await until(lambda: heard.names == ["web-node-1"])


async def test_file_source_path_appears_and_disappears_is_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a" / "b" / "manifests"

    def lines() -> int:
        return sum("static pod path" in record.message.lower() for record in caplog.records)

    async with watching(folder) as heard:

        async def gone(lines_before: int) -> None:
            await until(lambda: heard.names == [] and lines() > lines_before)

        assert heard.sets == [([], [])]
        for _ in range(2):
            before = lines()
            folder.mkdir(parents=True)
            (folder / "web.yaml").write_text(manifest("web"))
            await until(lambda: heard.names == ["web-node-1"])
            shutil.rmtree(tmp_path / "a")
            await gone(before)
    assert lines() == 3


async def test_file_source_directory_replaced_reads_new_directory(folder: Path, tmp_path: Path) -> None:
    (folder / "web.yaml").write_text(manifest("web"))
    new = tmp_path / "new"
    new.mkdir()
    (new / "other.yaml").write_text(manifest("other"))
    async with watching(folder) as heard:
        folder.rename(tmp_path / "old")
        new.rename(folder)
        await until(lambda: heard.names == ["other-node-1"])
        (folder / "more.yaml").write_text(manifest("more"))
        await until(lambda: heard.names == ["more-node-1", "other-node-1"])


async def test_file_source_directory_symlink_retargeted_reads_new_target(tmp_path: Path) -> None:
    for version in ("v1", "v2"):
        (tmp_path / "data" / version).mkdir(parents=True)
        (tmp_path / "data" / version / "a.yaml").write_text(manifest(version))
    (tmp_path / "data" / "current").symlink_to("v1")
    (tmp_path / "manifests").symlink_to("data/current")
    async with watching(tmp_path / "manifests") as heard:
        assert heard.names == ["v1-node-1"]
        (tmp_path / "data" / "next").symlink_to("v2")
        (tmp_path / "data" / "next").rename(tmp_path / "data" / "current")
        await until(lambda: heard.names == ["v2-node-1"])
        put(tmp_path / "data" / "v2" / "a.yaml", manifest("v3"))
        await until(lambda: heard.names == ["v3-node-1"])


async def test_file_source_symlinked_file_follows_target(folder: Path, tmp_path: Path) -> None:
    target = tmp_path / "web.yaml"
    target.write_text(manifest("web"))
    (folder / "web.yaml").symlink_to(target)
    async with watching(folder) as heard:
        assert heard.names == ["web-node-1"]
        target.write_text(manifest("other"))
        await until(lambda: heard.names == ["other-node-1"])
        target.unlink()
        await until(lambda: heard.names == [])
        assert "is a link" in heard.problems[0]
        target.write_text(manifest("again"))
        await until(lambda: heard.names == ["again-node-1"])


async def test_file_source_config_map_volume_layout_follows_data_symlink(folder: Path) -> None:
    for version in ("..v1", "..v2"):
        (folder / version).mkdir()
        (folder / version / "web.yaml").write_text(manifest(version.strip(".")))
    (folder / "..data").symlink_to("..v1")
    (folder / "web.yaml").symlink_to("..data/web.yaml")
    async with watching(folder) as heard:
        assert heard.names == ["v1-node-1"]
        (folder / "..data_tmp").symlink_to("..v2")
        (folder / "..data_tmp").rename(folder / "..data")
        await until(lambda: heard.names == ["v2-node-1"])


async def test_file_source_path_is_single_file_ignores_neighbours(tmp_path: Path) -> None:
    file = tmp_path / "web.yaml"
    async with watching(file) as heard:
        assert heard.names == []
        file.write_text(manifest("web"))
        await until(lambda: heard.names == ["web-node-1"])
        put(file, manifest("other"))
        await until(lambda: heard.names == ["other-node-1"])
        for n in range(50):
            (tmp_path / f"neighbour{n}").touch()
        await asyncio.sleep(0.1)
        assert len(heard.sets) == 3
        file.unlink()
        await until(lambda: heard.names == [])


async def test_file_source_path_is_pipe_reports_nothing(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    heard = Heard()
    task = asyncio.ensure_future(FileSource(pipe, RARELY, NODE, heard).run())
    try:
        await asyncio.sleep(0.1)
        assert heard.sets == []
        pipe.unlink()
        pipe.write_text(manifest("web"))
        await until(lambda: bool(heard.sets))
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_file_source_duplicate_pod_name_uses_first_file(folder: Path) -> None:
    (folder / "b.yaml").write_text(manifest("web"))
    async with watching(folder) as heard:
        uid = heard.sets[-1][0][0].uid
        (folder / "a.yaml").write_text(manifest("web", hostNetwork=True))
        await until(lambda: bool(heard.problems))
        assert heard.sets[-1][0][0].uid != uid
        assert heard.problems[0].startswith(
            f"{folder}/b.yaml: pod default/web-node-1 is already in {folder}/a.yaml"
        )
        (folder / "a.yaml").unlink()
        await until(lambda: not heard.problems)
        assert heard.sets[-1][0][0].uid == uid


async def test_file_source_huge_and_hostile_files_do_not_block_others(folder: Path) -> None:
    (folder / "a-huge.yaml").write_text(manifest("huge") + "# " + "x" * 10 * 1024**2)
    bomb = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    bomb += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 20)]
    (folder / "b-bomb.yaml").write_text("\n".join(bomb))
    (folder / "c-slash.yaml").write_text(manifest("../../etc"))
    (folder / "d-binary.yaml").write_bytes(os.urandom(1000))
    (folder / "e-good.yaml").write_text(manifest("good"))
    async with watching(folder) as heard:
        assert heard.names == ["good-node-1"]
        assert [problem.partition(": ")[0].rpartition("/")[2] for problem in heard.problems] == [
            "a-huge.yaml",
            "b-bomb.yaml",
            "c-slash.yaml",
            "d-binary.yaml",
        ]
        assert "metadata.name" in heard.problems[2]


async def test_file_source_large_file_does_not_block_event_loop(folder: Path) -> None:
    variables = [{"name": f"V{n}", "value": "x" * 100} for n in range(10_000)]
    container = {"name": "main", "image": "x", "env": variables}
    (folder / "large.yaml").write_text(manifest("large", containers=[container]))
    longest = 0.0

    async def beat() -> None:
        nonlocal longest
        while True:
            # Processor time of the event loop's thread: time of other threads and processes is no pause.
            begin = time.thread_time()
            await asyncio.sleep(0.005)
            longest = max(longest, time.thread_time() - begin)

    heart = asyncio.ensure_future(beat())
    began = time.process_time()
    try:
        async with watching(folder) as heard:
            assert heard.names == ["large-node-1"]
    finally:
        heart.cancel()
    # Reading it in the loop would have been one long pause.
    assert longest < (time.process_time() - began) / 2


async def test_file_source_without_inotify_periodic_scan_finds_changes(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left() -> None:
        raise OSError(24, "no inotify instances left")

    monkeypatch.setattr(path_watch, "Inotify", none_left)
    async with watching(folder, Duration.from_seconds(0.1)) as heard:
        (folder / "web.yaml").write_text(manifest("web"))
        await until(lambda: heard.names == ["web-node-1"])
        put(folder / "web.yaml", manifest("other"))
        await until(lambda: heard.names == ["other-node-1"])


async def test_file_source_change_with_same_size_and_mtime_is_detected(folder: Path) -> None:
    """Two writes within one tick of the clock look the same from outside."""
    file = folder / "web.yaml"
    async with watching(folder, Duration.from_seconds(0.1)) as heard:
        for n in range(10):
            file.write_text(manifest("web", hostname=f"h{n}"))
        await until(heard.hostname_is("h9"))


async def test_file_source_stopped_closes_inotify(folder: Path) -> None:
    def watchers() -> int:
        return sum("inotify" in os.path.realpath(fd) for fd in Path("/proc/self/fd").iterdir())

    before = watchers()
    async with watching(folder):
        assert watchers() == before + 1
    assert watchers() == before


async def test_file_source_inotify_queue_overflow_rescans(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = inotify.parse_events

    def lost(data: bytes) -> list[inotify.Event]:
        return [inotify.Event(-1, inotify.Mask.Q_OVERFLOW, 0, "")] if real(data) else []

    monkeypatch.setattr(inotify, "parse_events", lost)
    async with watching(folder) as heard:
        (folder / "web.yaml").write_text(manifest("web"))
        await until(lambda: heard.names == ["web-node-1"])


def test_directories_to_watch_follows_symlinks_and_missing_parents(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "a.yaml").touch()
    (tmp_path / "real" / "a.yaml").symlink_to("../elsewhere/a.yaml")
    (tmp_path / "real" / ".hidden").symlink_to("/etc/passwd")
    (tmp_path / "link").symlink_to("real")
    assert directories_to_watch(tmp_path / "link") == {
        tmp_path: frozenset({"link", "real"}),
        tmp_path / "link": frozenset(),
        tmp_path / "link" / ".." / "elsewhere": frozenset({"a.yaml"}),
    }
    assert directories_to_watch(tmp_path / "no" / "such" / "folder") == {tmp_path: frozenset({"no"})}
    (tmp_path / "loop").symlink_to("loop")
    assert directories_to_watch(tmp_path / "loop") == {tmp_path: frozenset({"loop"})}


async def test_path_watch_end_wait_while_wait_is_ending_is_ignored(tmp_path: Path) -> None:
    with path_watch.PathWatch() as watch:
        watch.arm(directories_to_watch(tmp_path))
        waiting = asyncio.create_task(watch.wait(600))
        while (deadline := watch._deadline) is None:
            await asyncio.sleep(0)
        watch.end_wait()
        while not deadline.expired():
            await asyncio.sleep(0)
        assert watch._deadline is deadline, "the wait has not returned yet"
        watch.end_wait()
        await asyncio.wait_for(waiting, 10)
