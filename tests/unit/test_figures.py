"""The figures of the source's structure, `scripts/figures`."""

import subprocess
import sys
from pathlib import Path

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
        "modules": "3",
        "code lines": "80",
        "modules under 40 code lines": "2",
        "modules with a single importer": "1",
        "median module": "11 code lines",
        "largest module": "60 code lines (long)",
        "largest constructor": "3 arguments (Line)",
        "protocols with one implementation": "1 (Shape)",
    }


def test_figures_of_this_source_no_constructor_above_ten_arguments() -> None:
    found = run()
    assert int(found["modules"]) > 400
    assert int(found["largest constructor"].split()[0]) <= 10
