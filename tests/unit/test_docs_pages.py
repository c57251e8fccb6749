"""Links of the README, marks of tested blocks, contents of reference pages (`make check` compares them)."""

import re
from pathlib import Path

import pytest
import typer

from pykubelet.cli.pykubelet import app
from pykubelet.config.live import RELOADABLE, field_paths
from tests.support.tutorials import DOCS, pages, steps

ROOT = Path(__file__).parents[2]
RULES = {"", "prints", "until", "fails", "exits", "file", "node", "stop", "down"}
TESTED = {"start.md", "edge.md", "from-compose.md", "migrating.md", "troubleshooting.md", "cluster-node.md"}


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_page_links_to_existing_files(name: str) -> None:
    text = (ROOT / name).read_text()
    links = re.findall(r"(?<!!)\[[^\]]*\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", text)
    named = re.findall(r"`((?:docs|tests|examples|scripts)/[\w./-]+\.\w+)`", text)
    assert links
    assert [path for path in [*links, *named] if not (ROOT / path).exists()] == []


def test_tutorials_with_marks_are_run_and_have_known_rules() -> None:
    """Verify that no page has marked blocks that no test runs."""
    assert set(pages()) == TESTED
    for page in TESTED:
        found = steps(page)
        assert {step.rule for step in found} <= RULES, page
        assert all(
            step.expected for step in found if step.rule in ("prints", "until", "fails", "exits", "file")
        )


def test_reference_lists_every_configuration_field_and_command() -> None:
    page = (DOCS / "reference/configuration.md").read_text()
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert rows.keys() == {path for path, _ in field_paths()}
    assert {path for path, line in rows.items() if "**yes**" in line} == set(RELOADABLE)
    commands = (DOCS / "reference/commands.md").read_text()
    root = typer.main.get_command(app)
    names = [name for name, command in getattr(root, "commands", {}).items() if not command.hidden]
    assert "up" in names
    assert [name for name in names if f"\n## pykubelet {name}" not in commands] == []
