"""The figures of the source's structure, `scripts/figures`."""

import importlib.util
import re
import subprocess
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "figures"
FILES = {
    "__init__.py": '"""A package."""\n',
    "shapes.py": '''"""Shapes,
in two lines of docstring."""

# A comment.
from typing import Protocol


class Shape(Protocol):
    """A shape."""

    def area(self) -> float: ...


class Callback(Protocol):
    def __call__(self) -> None: ...


class Named(Protocol):
    name: str


class Line:
    points = 2
''',
    "kinds/square.py": """from package.shapes import Shape


class Square:
    def __init__(self, side: float, *, name: str) -> None:
        self.side = side
        self.name = name

    def area(self) -> float:
        return self.side**2


class Point:
    name = ""


class Line:
    def __init__(self, start: Point, end: Point, *, width: int) -> None: ...
""",
    "kinds/other.py": """import asyncio
from dataclasses import dataclass
from typing import Protocol

from package.kinds import square
from package.kinds.square import Line as Edge
from package.kinds.square import Square


class Shape:
    def __init__(self) -> None:
        area = 1.0


class Named(Protocol):
    title: str


class Measured:
    def side(self, unit: str) -> float: ...


class Unit(Protocol):
    def side(self, unit: str) -> float: ...


class Listener(asyncio.Protocol):
    side = 1


class Title:
    title = "somebody asks"  # Whoever asks.


@dataclass
class Record:
    side: int = 0

    def grow(self, other: "Record") -> None:
        other.side += 1


class Editor:
    def __init__(self, square: Square, record: Record) -> None:
        self._square = square
        self._record = record

    def edit(self, edges: list[Edge]) -> None:
        self._square.side = 2
        self._record.side = 2
        line = Edge(1, 2, width=3)
        line.width = 4
        for edge in edges:
            edge.width = 5


def rename(square: "Square | None", other: object) -> None:
    square.name = ""
    other.unknown = 1
""",
    "messages_pb2.py": "x = 1\n" * 50,
    "long.py": "x = 1\n" * 60,
}


def run(*arguments: object) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=True
    )
    return dict(line.split(": ", 1) for line in done.stdout.splitlines())


def test_figures_of_small_package_are_counted(tmp_path: Path) -> None:
    for name, text in FILES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert run(tmp_path / "package") == {
        "modules": "4",
        "code lines": "118",
        "modules under 40 code lines": "3",
        "modules with a single importer": "2",
        "median module": "24.5 code lines",
        "largest module": "60 code lines (long)",
        "largest constructor": "3 arguments (Line)",
        "protocols with one implementation": "3 (Named, Shape, Unit)",
        "attributes assigned from outside": "3 (Line.width, Square.name, Square.side)",
        "dialect hits per 1,000 lines": "12.4",
    }


@pytest.fixture(scope="module")
def found() -> dict[str, str]:
    """Figures of the classes of this source; those of its modules would take as long again."""
    loader = SourceFileLoader("figures", str(SCRIPT))
    spec = importlib.util.spec_from_loader("figures", loader)
    assert spec is not None
    figures = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setitem(sys.modules, "figures", figures)  # for its dataclasses
        loader.exec_module(figures)
        modules = figures.read_modules(SCRIPT.parents[1] / "src/pykubelet")
        assert len(modules) > 400
        structure: dict[str, str] = figures.structure(figures.parsed(modules))
    return structure


def test_figures_of_this_source_no_constructor_above_ten_arguments(found: dict[str, str]) -> None:
    assert int(found["largest constructor"].split()[0]) <= 10


def test_figures_architecture_page_explains_protocols_and_assigned_attributes(found: dict[str, str]) -> None:
    """Verify that the page names exactly the protocols with one implementation, and the assigned classes."""
    page = (SCRIPT.parents[1] / "docs/architecture.md").read_text()
    protocols, attributes = (
        set(found[figure].partition("(")[2].rstrip(")").split(", "))
        for figure in ("protocols with one implementation", "attributes assigned from outside")
    )
    paragraph = page.partition("A protocol with one implementation ")[2].partition("\n\n")[0]
    assert set(re.findall(r"`(\w+)`", paragraph)) == protocols
    paragraph = page.partition("The attributes that are still assigned ")[2].partition("\n\n")[0]
    classes = {attribute.partition(".")[0] for attribute in attributes}
    assert classes <= set(re.findall(r"`(\w+)", paragraph))
