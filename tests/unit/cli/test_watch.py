"""Tables that are updated: which rows are printed, and what an error does."""

import asyncio
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from typer.testing import CliRunner

from pykubelet.cli.client import NodeError
from pykubelet.cli.images import listing
from pykubelet.cli.images.listing import ListedImage
from pykubelet.cli.options import NodeSelection
from pykubelet.cli.pods import events
from pykubelet.cli.pykubelet import app
from pykubelet.cli.watch import Watch, WatchedRow, changed_cells, watch_table
from pykubelet.standalone.instance import Instance
from tests.support.cli_node import Terminal, command, environment


def row(name: str, status: str, age: str = "1s") -> WatchedRow:
    return WatchedRow((name,), (name, status, age), (name, status))


class Stop(Exception):
    """Ends a watch."""


def lines_of(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    *reads: Sequence[WatchedRow] | Exception,
) -> tuple[list[str], str]:
    """Return what a watch prints for these results of its reads."""
    results = iter(reads)

    def read() -> Sequence[WatchedRow]:
        result = next(results, Stop())
        if isinstance(result, Exception):
            raise result
        return result

    monkeypatch.setattr(time, "sleep", lambda _: None)
    with pytest.raises(Stop):
        watch_table(Watch("pykubelet x", ("NAME", "STATUS", "AGE"), read, (NodeError,), 1))
    captured = capsys.readouterr()
    return captured.out.splitlines(), captured.err


def test_changed_cells_are_new_changed_and_gone_rows_but_not_ages() -> None:
    before = [row("a", "Running"), row("b", "Running"), row("c", "Running")]
    after = [row("a", "Running", "9s"), row("b", "Failed"), row("d", "Pending")]
    assert changed_cells(before, after, 1) == [
        ("c", "Gone", "1s"),
        ("b", "Failed", "1s"),
        ("d", "Pending", "1s"),
    ]


def test_watch_table_outside_of_a_terminal_prints_changes_and_survives_errors(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = lines_of(
        capsys,
        monkeypatch,
        [row("a", "Running")],
        [row("a", "Running", "2s")],
        NodeError("it is \x1b[31mgone"),
        NodeError("it is \x1b[31mgone"),
        [row("a", "Failed", "3s")],
        [],
    )
    assert [line.split() for line in out] == [
        ["NAME", "STATUS", "AGE"],
        ["a", "Running", "1s"],
        ["a", "Failed", "3s"],
        ["a", "Gone", "3s"],
    ]
    assert err == "pykubelet x: it is \\x1b[31mgone\n"


def test_watch_table_without_rows_prints_heading_and_first_error_ends_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lines_of(capsys, monkeypatch, []) == (["NAME   STATUS   AGE"], "")
    with pytest.raises(NodeError):
        lines_of(capsys, monkeypatch, NodeError("no"))


CONFIG = "apiVersion: v1\nkind: ConfigMap\nmetadata: {name: %s}\n"


async def test_get_watch_prints_objects_that_are_added_and_removed(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    instance.manifests.mkdir(parents=True)
    (instance.manifests / "a.yaml").write_text(CONFIG % "first")
    process = await asyncio.create_subprocess_exec(
        *command(instance, "get", "-w"), stdout=PIPE, stderr=PIPE, env=environment()
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):

            async def line() -> list[str]:
                assert process.stdout is not None
                return (await process.stdout.readline()).decode().split()

            assert (await line())[:2] == ["KIND", "NAME"]
            assert (await line())[:2] == ["ConfigMap", "first"]
            (instance.manifests / "b.yaml").write_text(CONFIG % "second")
            assert (await line())[:2] == ["ConfigMap", "second"]
            (instance.manifests / "a.yaml").unlink()
            assert (await line())[:5] == ["ConfigMap", "first", "default", "-", "Gone"]
    finally:
        process.terminate()
        await process.wait()


async def test_get_watch_on_a_terminal_redraws_and_ends_with_ctrl_c(data_dir: Path) -> None:
    instance = Instance.at(data_dir)
    instance.manifests.mkdir(parents=True)
    (instance.manifests / "a.yaml").write_text(CONFIG % "first")
    terminal = Terminal(command(instance, "get", "--watch"))
    await terminal.until("first")
    (instance.manifests / "b.yaml").write_text(CONFIG % "second")
    await terminal.until("second")
    await terminal.until("Ctrl-C ends the watching")
    terminal.type("\x03")
    await terminal.read_all()
    assert await terminal.end() == 130


def test_images_ls_watch_prints_pins_and_users_that_change(
    data_dir: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = ListedImage(id="sha256:1", names=["web:1"], digests=[], size=5, pinned=False, pods=[])
    results = iter(
        [
            [image],
            [replace_image(image, last_used=1.0)],
            [replace_image(image, pods=["default/web"])],
            [replace_image(image, pinned=True)],
            [],
        ]
    )

    class Images:
        async def __aenter__(self) -> Any:
            return None

        async def __aexit__(self, *_: object) -> None:
            return None

    async def chosen(*_: object) -> list[ListedImage]:
        found = next(results, None)
        if found is None:
            raise KeyboardInterrupt
        return found

    monkeypatch.setattr(listing, "node_images", lambda node: Images())
    monkeypatch.setattr(listing, "_chosen", chosen)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert listing.run_list(NodeSelection(data_dir), (), "table", watch=True) == 130
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    # The pod count and the pin change once each; a last use alone is only an age.
    assert [line[0] for line in lines] == ["IMAGE", "web:1", "web:1", "web:1", "web:1"]
    assert ["yes" in line for line in lines] == [False, False, False, True, True]
    assert ["Gone" in line for line in lines] == [False, False, False, False, True]


def replace_image(image: ListedImage, **fields: Any) -> ListedImage:
    return msgspec.structs.replace(image, **fields)


@pytest.mark.parametrize("arguments", [("get",), ("images", "ls"), ("ps",)])
def test_watch_of_a_document_is_wrong_usage(arguments: tuple[str, ...]) -> None:
    assert CliRunner().invoke(app, [*arguments, "-w", "-o", "json"]).exit_code == 2


def test_events_watch_is_the_same_as_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[bool] = []

    def run_events(_: NodeSelection, options: events.EventOptions) -> int:
        followed.append(options.follow)
        return 0

    monkeypatch.setattr(events, "run_events", run_events)
    for option in ("-f", "-w", "--follow", "--watch"):
        assert CliRunner().invoke(app, ["events", option]).exit_code == 0
    assert followed == [True] * 4
