"""Commands of the tutorials in docs/: fenced shell blocks that a comment before them marks as tested.

    <!-- test -->                 the block exits with 0
    <!-- test: prints TEXT -->    it also prints TEXT (as `TEXT` in any case)
    <!-- test: until TEXT -->     it is repeated until it prints TEXT
    <!-- test: fails with TEXT -->  it exits with another code, and prints TEXT
    <!-- test: exits 0 1 -->      it exits with one of these codes
    <!-- test: file NAME -->      not a command: the block is the content of a file
    <!-- test: node -->, `down`   the start and the removal of the node, which the caller runs

Blocks of a page run in one directory in their order. Its paths and ports are replaced by those of the test.
"""

import os
import re
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_BLOCK = re.compile(
    r"^<!-- test(?:: (?P<rule>[^\n]*?))? -->\n```[a-z]+\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
_MARK = re.compile(r"^<!-- test\b", re.MULTILINE)
UNTIL_SECONDS = 45.0
COMMAND_SECONDS = 120.0


@dataclass(frozen=True)
class Step:
    """A marked block of a page."""

    page: str
    line: int
    rule: str
    """Word of the mark: empty, `prints`, `until`, `fails`, `exits`, `file`, `node` or `down`."""
    expected: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def steps(page: str) -> list[Step]:
    """Return the marked blocks of a page. Fails for a mark that no block follows."""
    content = (DOCS / page).read_text()
    found = [_step(page, content, match) for match in _BLOCK.finditer(content)]
    assert len(found) == len(_MARK.findall(content)), f"{page}: a mark has no fenced block directly below it"
    return found


def _step(page: str, content: str, match: re.Match[str]) -> Step:
    rule, _, expected = (match["rule"] or "").partition(" ")
    expected = expected.removeprefix("with ") if rule == "fails" else expected
    line = content.count("\n", 0, match.start()) + 2
    return Step(page, line, rule, expected, match["text"])


class Tutorial:
    """Runs steps in a directory, with replacements of texts such as paths and ports."""

    def __init__(self, directory: Path, replaced: Mapping[str, str], env: Mapping[str, str]) -> None:
        self._directory = directory
        self._replaced = replaced
        self._env = {**os.environ, **env}

    def translate(self, text: str) -> str:
        """Return a text of a page with the paths and ports of the test."""
        for old, new in self._replaced.items():
            text = text.replace(old, new)
        return text

    def run(self, step: Step) -> None:
        """Run a step, and check its outcome. Raises AssertionError with all that it printed."""
        if step.rule == "file":
            (self._directory / step.expected).write_text(self.translate(step.text))
            return
        code, output = self._shell(step)
        expected = self.translate(step.expected)
        match step.rule:
            case "":
                assert code == 0, _failure(step, code, output)
            case "prints":
                assert code == 0, _failure(step, code, output)
                assert expected.lower() in output.lower(), _failure(step, code, output)
            case "until":
                deadline = time.monotonic() + UNTIL_SECONDS
                while expected.lower() not in output.lower():
                    assert time.monotonic() < deadline, _failure(step, code, output)
                    time.sleep(0.2)
                    code, output = self._shell(step)
            case "fails":
                assert code != 0, _failure(step, code, output)
                assert expected.lower() in output.lower(), _failure(step, code, output)
            case "exits":
                assert str(code) in expected.split(), _failure(step, code, output)
            case _:
                raise AssertionError(f"{step}: there is no rule {step.rule!r}")

    def _shell(self, step: Step) -> tuple[int, str]:
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", self.translate(step.text)],
            cwd=self._directory,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=COMMAND_SECONDS,
            text=True,
        )
        return done.returncode, done.stdout


def _failure(step: Step, code: int, output: str) -> str:
    expected = f", expected {step.rule} {step.expected!r}" if step.rule else ""
    return f"{step}{expected}, exit code {code}:\n{step.text}\n{output}"


def pages() -> Iterator[str]:
    """Yield the pages that have marked blocks."""
    for path in sorted(DOCS.glob("*.md")):
        if _MARK.search(path.read_text()):
            yield path.name
