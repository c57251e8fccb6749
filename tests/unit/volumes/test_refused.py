"""Kinds that are refused: each in one line with what to use instead."""

from pathlib import Path

import pytest

from pykubelet.api.volume import Volume
from pykubelet.volumes.csi.names import MIGRATED
from pykubelet.volumes.errors import BadSource
from pykubelet.volumes.plugins.image import REASONS, UnsupportedVolumePlugin
from pykubelet.volumes.registry import load_plugins
from tests.support.volume_programs import surroundings, wanted
from tests.support.volumes import Shelf, pod_with

BY_CLAIM = {"persistentVolumeClaim", "ephemeral"}


@pytest.mark.parametrize("kind", REASONS)
async def test_unsupported_volume_plugin_error_names_alternative(kind: str) -> None:
    with pytest.raises(BadSource) as caught:
        await UnsupportedVolumePlugin().set_up(wanted(pod_with({"name": "v", kind: {}})))
    text = str(caught.value)
    assert text.startswith(f"{kind} volumes ")
    assert "\n" not in text
    assert "use " in text or "instead" in text


def test_unsupported_volume_plugin_git_repo_names_cve() -> None:
    assert "CVE-2024-10220" in REASONS["gitRepo"]
    assert "init container" in REASONS["gitRepo"]


def test_load_plugins_covers_every_volume_type_of_api(tmp_path: Path, shelf: Shelf) -> None:
    known = {wire for wire in Volume.__struct_encode_fields__ if wire != "name"}
    kinds = load_plugins(surroundings(tmp_path, shelf))
    assert known - set(kinds) - BY_CLAIM - set(MIGRATED) == set()
