"""`pykubelet images` without a runtime, and its output."""

import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from pykubelet.cli.images.listing import ListedImage, render
from pykubelet.standalone.instance import Instance
from tests.support.images_cli import images


@pytest.mark.parametrize("arguments", [("ls",), ("pull", "busybox"), ("save", "busybox", "-o", "x")])
async def test_images_node_not_running_says_how_to_start_it(
    data_dir: Path, arguments: tuple[str, ...]
) -> None:
    ran = await images(Instance.at(data_dir), *arguments)
    assert (ran.code, ran.out, ran.err) == (
        1,
        "",
        f"pykubelet images {arguments[0]}: no node runs on {data_dir}: "
        f"start it with `pykubelet up --data-dir {data_dir}`\n",
    )


def test_render_json_is_ascii() -> None:
    image = ListedImage(id="sha256:1", names=["a\x9b31m/é:1"], digests=[], size=1, pinned=False, pods=[])
    text = render([image], "json", datetime.now(UTC))
    assert text.isascii()
    assert json.loads(text)["items"][0]["names"] == ["a\x9b31m/é:1"]
