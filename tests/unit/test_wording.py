"""The dialect check of the style guide, `scripts/wording`."""

import importlib.machinery
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "wording"


@pytest.fixture(scope="module")
def wording() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("wording", str(SCRIPT))
    spec = importlib.util.spec_from_loader("wording", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("source", "hits"),
    [
        ('"""Return the path."""', []),
        ('"""What is given to whom."""', ["What", "whom"]),
        ("# Nobody asks for it.", ["asks", "Nobody"]),
        ('log.info("Tell the folder")', ["Tell", "folder"]),
        ('Counter("total", "Wishes of pods.")', ["Wishes"]),
        ('text = "somebody asks"', []),
        ("def of(self, wanted): ...", ["of", "wanted"]),
        ("class Allotting: ...", ["Allotting"]),
        ("class Housekeeping: ...", []),
        ("desired_pods = 1", []),
    ],
)
def test_wording_source_yields_hits(wording: ModuleType, source: str, hits: list[str]) -> None:
    found = [hit for text in wording.texts(source) for hit in wording.hits(text)]
    assert sorted(found) == sorted(hits)


def test_wording_rate_above_bound_exits_with_1(
    wording: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "src" / "pykubelet" / "node"
    package.mkdir(parents=True)
    monkeypatch.setattr(wording, "SOURCE", package.parent)
    monkeypatch.setattr("sys.argv", ["wording", "--list"])
    (package / "status.py").write_text('"""Return the node status."""\n')
    assert wording.main() == 0
    (package / "status.py").write_text('"""Return what everybody wants."""\n')
    assert wording.main() == 1
    output = capsys.readouterr()
    assert "src/pykubelet/node/status.py:1:" in output.out
    assert "above the allowed rate" in output.err
