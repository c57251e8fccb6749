import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.volume import KeyToPath
from pykubelet.volumes.errors import VolumePluginError, join_reasons
from pykubelet.volumes.file_projection import (
    MAX_DEPTH,
    MAX_PATH_LENGTH,
    File,
    build_tree,
    checked_path,
    files_for_keys,
)

A = File(b"a", 0o644)


@pytest.mark.parametrize(
    ("path", "clean"),
    [
        ("a", "a"),
        ("a/b/c", "a/b/c"),
        ("./a//b/", "a/b"),
        (".hidden", ".hidden"),
        ("a/..b", "a/..b"),
        ("a..", "a.."),
        ("ü" * 127, "ü" * 127),
        ("a/" * MAX_DEPTH + "b", "a/" * MAX_DEPTH + "b"),
    ],
)
def test_checked_path_valid_path_returns_clean_path(path: str, clean: str) -> None:
    assert checked_path(path) == clean


@pytest.mark.parametrize(
    ("path", "problem"),
    [
        ("", "must name a file"),
        (".", "must name a file"),
        ("a\0b", "must name a file"),
        ("/a", "must be relative path: /a"),
        ("a/../b", "must not contain '..': a/../b"),
        ("..", "must not contain '..'"),
        ("..data", "must not start with '..': ..data"),
        ("./..data/x", "must not start with '..'"),
        ("...", "must not start with '..'"),
        ("ü" * 128, "filenames must be less than or equal to 255"),
        ("a/" * (MAX_PATH_LENGTH // 2) + "b", "must be less than or equal to 4096"),
        ("a/" * (MAX_DEPTH + 1) + "b", "must not have more than 64 folders"),
        ("a\udcff", "must be text"),
    ],
)
def test_checked_path_invalid_path_raises(path: str, problem: str) -> None:
    with pytest.raises(VolumePluginError) as caught:
        checked_path(path)
    assert str(caught.value).startswith("invalid path: ")
    assert problem in str(caught.value)


@given(st.text(alphabet=st.sampled_from("ab./\0ü\udc80"), max_size=40) | st.text())
def test_checked_path_any_text_stays_inside_volume(path: str) -> None:
    try:
        clean = checked_path(path)
    except VolumePluginError:
        return
    whole = posixpath.normpath(posixpath.join("/volume", clean))
    assert whole == f"/volume/{clean}"
    assert not clean.startswith("..")
    assert "\0" not in clean


class TestKeys:
    DATA = {"a": b"1", "b": b"2"}

    def test_files_for_keys_no_items_returns_all_keys(self) -> None:
        files = files_for_keys(self.DATA, [], 0o400, optional=False, missing="no")
        assert files == {"a": File(b"1", 0o400), "b": File(b"2", 0o400)}

    def test_files_for_keys_items_returns_selected_paths(self) -> None:
        items = [KeyToPath(key="b", path="x/y"), KeyToPath(key="b", path="z", mode=0)]
        files = files_for_keys(self.DATA, items, 0o400, optional=False, missing="no")
        assert files == {"x/y": File(b"2", 0o400), "z": File(b"2", 0)}

    def test_files_for_keys_missing_key_raises_unless_optional(self) -> None:
        items = [KeyToPath(key="c", path="x"), KeyToPath(key="a", path="y")]
        with pytest.raises(VolumePluginError, match=r"^no such key: c$"):
            files_for_keys(self.DATA, items, 0o400, optional=False, missing="no such key")
        assert files_for_keys(self.DATA, items, 0o400, optional=True, missing="") == {"y": File(b"1", 0o400)}


def test_build_tree_nests_directories() -> None:
    tree = build_tree({"a": A, "b/c": A, "./b//d/e": A, "mode": File(b"", 0o106755)})
    assert tree == {"a": A, "b": {"c": A, "d": {"e": A}}, "mode": File(b"", 0o755)}


@pytest.mark.parametrize("paths", [["a", "a/b"], ["a/b", "a"], ["x/a", "x/a/b/c"]])
def test_build_tree_path_is_file_and_directory_raises(paths: list[str]) -> None:
    with pytest.raises(VolumePluginError, match="cannot be a file and a folder"):
        build_tree(dict.fromkeys(paths, A))


def test_file_repr_hides_content() -> None:
    assert "secret" not in repr({"x": File(b"secret", 0o600, user=5)})


@pytest.mark.parametrize(
    ("reasons", "text"),
    [(["a"], "a"), (["a", "a"], "a"), (["a", "b", "a"], "[a, b]"), (["[a, b]"], "[a, b]")],
)
def test_join_reasons_deduplicates_and_brackets(reasons: list[str], text: str) -> None:
    assert join_reasons(reasons) == text
