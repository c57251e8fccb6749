"""The architecture page and its figure match the source tree."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = {path.parent.name for path in (ROOT / "src/pykubelet").glob("*/__init__.py")}


def test_diagram_check_figure_is_current() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/diagram"), "--check"], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr


def test_architecture_page_lists_every_package() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    assert set(re.findall(r"^\| `(\w+)/`", page, re.M)) == PACKAGES


def test_architecture_pages_named_modules_exist() -> None:
    pages = [ROOT / "docs/architecture.md", *(ROOT / "docs/packages").glob("*.md")]
    packages = "|".join(sorted(PACKAGES))
    for page in pages:
        for name in re.findall(rf"`((?:{packages})(?:/\w+)+)[`:]", page.read_text()):
            path = ROOT / "src/pykubelet" / name
            assert path.is_dir() or path.with_suffix(".py").exists(), f"{page.name} names {name}"


def test_architecture_page_path_of_a_pod_has_at_most_twelve_files() -> None:
    page = (ROOT / "docs/architecture.md").read_text()
    section = page.partition("## The path of one pod\n")[2].partition("\n## ")[0]
    names = re.findall(r"^ {4,}(\w+(?:/\w+)+)(?:/\*)? {2,}\S", section, re.M)
    assert names[0] == "podconfig/file_source"
    assert names[-1] == "status/manager"
    for name in names:
        path = ROOT / "src/pykubelet" / name
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    assert len([name for name in names if name != "podsync/stages"]) <= 12
