"""Flags that upstream has removed: rejected with their version and their replacement."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.flag_table import BY_NAME
from pykubelet.config.flags.parser import parse_flags
from pykubelet.config.flags.removed_flags import REMOVED_BY_NAME, REMOVED_FLAGS, RemovedFlag
from pykubelet.config.load import load

ROOT = Path(__file__).parents[3]
LAST_VERSION = {
    name: last
    for name, _, last in (
        line.split("\t") for line in (ROOT / "tests/data/removed-flags.tsv").read_text().splitlines()[1:]
    )
}
"""Last version with the flag, read from the sources of v1.3.0 to v1.25.0."""


def test_removed_flags_names_and_versions_match_upstream() -> None:
    following = {name: f"v1.{int(last.removeprefix('v1.')) + 1}" for name, last in LAST_VERSION.items()}
    del following["cadvisor-port"]  # its page exists again
    assert {flag.name: flag.removed_in for flag in REMOVED_FLAGS} == following
    assert len(REMOVED_BY_NAME) == len(REMOVED_FLAGS) == 62
    assert not set(REMOVED_BY_NAME) & set(BY_NAME)


@pytest.mark.parametrize("flag", REMOVED_FLAGS, ids=lambda flag: flag.name)
def test_removed_flag_replacement_names_existing_flags(flag: RemovedFlag) -> None:
    named = set(re.findall(r"--([a-z-]+)", flag.replacement))
    assert named <= set(BY_NAME)
    assert flag.replacement
    assert "\n" not in flag.problem


@pytest.mark.parametrize("flag", REMOVED_FLAGS, ids=lambda flag: flag.name)
@pytest.mark.parametrize("form", ["{}=pa55", "{} pa55", "{}"])
def test_parse_flags_removed_flag_problem_has_version_and_replacement(flag: RemovedFlag, form: str) -> None:
    for name in (flag.name, flag.name.replace("-", "_")):
        arguments = form.format(f"--{name}").split()
        (problem,) = parse_flags([*arguments, "--max-pods=5"]).problems
        assert problem.path == f"--{flag.name}"
        assert problem.message == f"it was removed in {flag.removed_in}: {flag.replacement}"
        assert "pa55" not in str(problem)


def test_load_removed_flags_all_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        load(["--docker-endpoint=unix:///run/docker.sock", "--google-json-key", "/k", "--max-podz=3"])
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("--docker-endpoint: it was removed in v1.24: use --container-runtime-endpoint")
    assert lines[1].startswith("--google-json-key: it was removed in v1.13: ")
    assert "did you mean --max-pods?" in lines[2]


def test_load_azure_container_registry_config_accepted_with_warning() -> None:
    loaded = load(["--azure-container-registry-config=/etc/kubernetes/azure.json"])
    (warning,) = (text for text in loaded.warnings if "azure" in text)
    assert "--image-credential-provider-config" in warning


def test_flags_page_is_current() -> None:
    checked = subprocess.run(
        [sys.executable, ROOT / "scripts/flags", "--check"], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stderr
