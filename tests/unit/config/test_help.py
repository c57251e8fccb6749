import json
import re

import pytest

from pykubelet import __version__
from pykubelet.config.flags.flag_table import FLAGS
from pykubelet.config.help import help_text, reported_version, version_line


def test_help_text_lists_each_flag_once_under_its_group() -> None:
    shown: list[tuple[str, str]] = []
    title = ""
    for line in help_text().splitlines():
        if heading := re.fullmatch(r"(\S.*):", line):
            title = heading[1]
        elif head := re.match(r" {2}(?:-\w, | {4})--([\w-]+)", line):
            shown.append((title, head[1]))
    assert shown == [(flag.group, flag.name) for flag in FLAGS]


@pytest.mark.parametrize("width", [60, 80, 100, 160])
def test_help_text_lines_fit_terminal_width(width: int) -> None:
    for line in help_text(width).splitlines():
        # What cannot be broken (a path, the name of a gate) may stick out; sentences may not.
        assert len(line) <= width or len(max(line.split(), key=len)) > width - 40, line


def test_help_text_width_one_does_not_fail() -> None:
    assert "--max-pods" in help_text(1)


def test_help_text_contains_types_defaults_fields_and_deprecations() -> None:
    text = " ".join(help_text(200).split())
    assert "--max-pods int32 Pods that the node takes. Default 110. [maxPods]" in text
    assert "-v, --v Level" in text
    assert "DEPRECATED (set --eviction-hard or --eviction-soft instead)." in text
    assert "[authentication.x509.clientCAFile]" in text
    assert "NodeDeclaredFeatures=true|false (BETA - default=true)" in text


def test_version_line_plain_raw_and_overridden() -> None:
    assert version_line() == f"Kubernetes v1.36.0+pykubelet{__version__}"
    raw = json.loads(version_line("raw"))
    assert (raw["major"], raw["minor"]) == ("1", "36")
    assert raw["gitVersion"] == reported_version()
    assert reported_version("v1.36.0-mine") == "v1.36.0-mine"
    assert reported_version("false") == reported_version()
