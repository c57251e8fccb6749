"""The flag table against the reference's list, and the parser against its habits."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pykubelet.config.flags.flag import Flag
from pykubelet.config.flags.flag_table import BY_NAME, FLAGS, get_field
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.flags.parser import parse_flags
from pykubelet.config.types import KubeletConfiguration

DATA = Path(__file__).parents[2] / "data" / "flags-v1.25.tsv"
REFERENCE = {
    name: [*cells, "", "", ""][:3]
    for name, *cells in (line.split("\t") for line in DATA.read_text().splitlines()[1:])
}
NEWER = {
    "config-dir",
    "fail-cgroupv1",
    "log-text-info-buffer-size",
    "log-text-split-stream",
    "topology-manager-policy-options",
}
"""Flags that v1.36 has and v1.25 had not."""

SAMPLES: dict[str, tuple[str, str]] = {
    "[]v1.Taint": ("a=b:NoSchedule", "a=b:Sometimes"),
    "Level": ("4", "loud"),
    "bool": ("true", "yes"),
    "colonSeparatedMultimapStringString": ("a:b", "a"),
    "duration": ("42s", "42"),
    "int": ("42", "many"),
    "int32": ("0x2a", "4294967296"),
    "ip": ("127.0.0.2", "localhost"),
    "mapStringBool": ("EventedPLEG=true", "EventedPLEG=maybe"),
    "mapStringString": ("a=b", ""),
    "pattern=N,...": ("loop=4", "loop"),
    "quantity": ("42Ki", "42KiB"),
    "reserved-memory": ("0:memory=1Gi", "memory=1Gi"),
    "severity": ("WARNING", "LOUD"),
    "string": ("text", ""),
    "strings": ("a,b", '"a'),
    "traceLocation": ("loop.py:64", "loop"),
    "uint": ("42", "-42"),
    "version": ("raw", "newest"),
}
"""A good and a bad value of each type; "" where nothing is bad, or not for all flags of the type."""

OWN_SAMPLES = {
    "cloud-provider": ("external", "aws"),
    "container-runtime": ("remote", "docker"),
    "eviction-hard": ("memory.available<1Gi", "memory.available=1Gi"),
    "eviction-soft": ("memory.available<1Gi", "memory.available=1Gi"),
}


UNLISTED = {"azure-container-registry-config"}
"""Flags that v1.25 had and its documentation did not list."""
OURS = {
    *("device-plugin-dir", "drain-on-stop", "pod-checkpoint-dir", "use-last-good-config", "watch-config"),
    *("page-port", "page-address", "cadvisor-port"),
}
"""What the reference does not have, or had before v1.12."""


def sample(flag: Flag) -> tuple[str, str]:
    return OWN_SAMPLES.get(flag.name, SAMPLES[flag.kind.name])


def test_flag_table_names_match_upstream() -> None:
    assert len(REFERENCE) == 163
    assert {flag.name for flag in FLAGS} == set(REFERENCE) | NEWER | UNLISTED | OURS
    assert len(BY_NAME) == len(FLAGS)


@pytest.mark.parametrize("name", REFERENCE)
def test_flag_table_types_match_upstream(name: str) -> None:
    # The reference's list shows these two by a word of their help instead of their type.
    shown = {"seccomp-default": "bool", "version": "version"}.get(name, REFERENCE[name][0])
    assert BY_NAME[name].kind.name == shown


@pytest.mark.parametrize("name", REFERENCE)
def test_flag_table_status_matches_upstream(name: str) -> None:
    since = {
        # v1.36 wants these in the file too.
        **dict.fromkeys(
            (
                "container-runtime-endpoint",
                "feature-gates",
                "image-service-endpoint",
                "logging-format",
                "tls-cipher-suites",
            ),
            "config file",
        ),
        # v1.36 took the deprecation back: `external` is how clouds are done now.
        "cloud-provider": "",
        "provider-id": "",
    }
    status = {"file": "config file", "deprecated": "deprecated", "ignored": "deprecated", "current": ""}
    assert status[BY_NAME[name].status] == since.get(name, REFERENCE[name][2])


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_flag_table_each_flag_has_one_target_and_help(flag: Flag) -> None:
    places = [bool(flag.field), bool(flag.attribute), flag.status == "ignored"]
    assert places.count(True) == 1
    if flag.field:
        get_field(KubeletConfiguration(), flag.field)
    if flag.attribute:
        assert flag.attribute in {field.name for field in dataclasses.fields(KubeletFlags)}
    assert flag.help.endswith(".")
    assert flag.group
    assert bool(flag.note) == (flag.status in ("deprecated", "ignored"))


def test_kubelet_flags_every_attribute_has_flag() -> None:
    assert {field.name for field in dataclasses.fields(KubeletFlags)} == {
        flag.attribute for flag in FLAGS if flag.attribute
    }


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_parse_flags_each_flag_accepted_in_all_spellings(flag: Flag) -> None:
    text, _ = sample(flag)
    spellings = [[f"--{flag.name}={text}"], [f"--{flag.name.replace('-', '_')}={text}"]]
    if not flag.kind.bare:
        spellings += [[f"--{flag.name}", text]]
    for words in spellings:
        parsed = parse_flags(words)
        assert parsed.problems == []
        assert parsed.values == {flag.name: flag.kind.parse(text)}
        assert parsed.names() == [flag.name]


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_parse_flags_each_flag_invalid_value_problem_names_flag(flag: Flag) -> None:
    _, text = sample(flag)
    if not text:
        return
    (problem,) = parse_flags([f"--{flag.name}={text}"]).problems
    assert problem.path == f"--{flag.name}"
    assert "\n" not in str(problem)


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if flag.kind.bare], ids=lambda flag: flag.name)
def test_parse_flags_bare_flag_does_not_consume_next_argument(flag: Flag) -> None:
    parsed = parse_flags([f"--{flag.name}", "false"])
    assert parsed.values == {flag.name: flag.kind.parse("true")}
    assert [problem.path for problem in parsed.problems] == ["'false'"]


@pytest.mark.parametrize("flag", [flag for flag in FLAGS if not flag.kind.bare], ids=lambda flag: flag.name)
def test_parse_flags_missing_value_reported(flag: Flag) -> None:
    (problem,) = parse_flags([f"--{flag.name}"]).problems
    assert "needs a value" in problem.message


@pytest.mark.parametrize(
    ("words", "values"),
    [
        ([], {}),
        (["-v", "4"], {"v": 4}),
        (["-v=4"], {"v": 4}),
        (["-v4"], {"v": 4}),
        (["--v=4"], {"v": 4}),
        (["-h"], {"help": True}),
        (["-hv4"], {"help": True, "v": 4}),
        (["--runonce=false"], {"runonce": False}),
        (["--config", "--odd--"], {"config": "--odd--"}),
        (["--config=a=b"], {"config": "a=b"}),
        (["--config="], {"config": ""}),
        (["--max-pods=1", "--max_pods", "2"], {"max-pods": 2}),
        (["--cluster-dns=::1", "--cluster-dns=::2,::3"], {"cluster-dns": ["::1", "::2", "::3"]}),
        (["--node-labels=a=1", "--node-labels=b=2,a=3"], {"node-labels": {"a": "3", "b": "2"}}),
        (["--address="], {}),
        (["--runonce", "--"], {"runonce": True}),
    ],
)
def test_parse_flags_valid_arguments_return_values(words: list[str], values: dict[str, Any]) -> None:
    parsed = parse_flags(words)
    assert parsed.problems == []
    assert parsed.values == values


@pytest.mark.parametrize(
    ("words", "path", "words_of_message"),
    [
        (["--max-pod=5"], "--max-pod", "did you mean --max-pods?"),
        (["--kubeconfg", "/etc/kubeconfig"], "--kubeconfg", "did you mean --kubeconfig?"),
        (["--zzz"], "--zzz", "--help"),
        (["-x"], "-x", "no such flag"),
        (["-config=a"], "-config=a", "did you mean --config?"),
        (["---config"], "---config", "no such flag"),
        (["--=x"], "--", "no such flag"),
        (["run"], "'run'", "there are no commands"),
        (["-"], "'-'", "not a flag"),
        (["--", "x"], "'x'", "not a flag"),
        (["--conf\nig=x"], "'--conf\\nig'", "did you mean --config?"),
    ],
)
def test_parse_flags_invalid_argument_problem_has_remedy(
    words: list[str], path: str, words_of_message: str
) -> None:
    (problem,) = parse_flags(words).problems
    assert problem.path == path
    assert words_of_message in problem.message


def test_parse_flags_several_invalid_arguments_all_reported() -> None:
    parsed = parse_flags(["--max-pods=many", "--nope", "serve", "--port=1", "-v"])
    assert [problem.path for problem in parsed.problems] == ["--max-pods", "--nope", "-v"]
    assert parsed.values == {"port": 1}


@given(st.lists(st.text(max_size=20) | st.sampled_from([f"--{flag.name}" for flag in FLAGS]), max_size=6))
@example(["-" * 200, "--" + "x" * 300])
def test_parse_flags_any_arguments_parsed_or_reported(words: list[str]) -> None:
    parsed = parse_flags(words)
    for problem in parsed.problems:
        assert "\n" not in str(problem)
    assert set(parsed.values) <= set(parsed.names())
