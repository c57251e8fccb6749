"""Values of flags: what each kind reads, refuses, and makes of a repetition."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.config.flags import flag as kinds
from pykubelet.config.flags.flag import FlagType
from pykubelet.config.flags.flag_table import FLAGS
from pykubelet.config.types import MemoryReservation, Taint, VModuleItem

GOOD: list[tuple[FlagType, str, Any]] = [
    *[(kinds.BOOL, text, True) for text in ("1", "t", "T", "TRUE", "true", "True")],
    *[(kinds.BOOL, text, False) for text in ("0", "f", "F", "FALSE", "false", "False")],
    (kinds.INT32, "0", 0),
    (kinds.INT32, "-5", -5),
    (kinds.INT32, "+5", 5),
    (kinds.INT32, "0x1F", 31),
    (kinds.INT32, "0b101", 5),
    (kinds.INT32, "0o17", 15),
    (kinds.INT32, "017", 15),
    (kinds.INT32, "1_000", 1000),
    (kinds.INT32, "2147483647", 2**31 - 1),
    (kinds.INT32, "-2147483648", -(2**31)),
    (kinds.INT, "9223372036854775807", 2**63 - 1),
    (kinds.UINT, "18446744073709551615", 2**64 - 1),
    (kinds.DURATION, "1m30s", Duration.from_seconds(90)),
    (kinds.DURATION, "-1m", Duration.from_seconds(-60)),
    (kinds.IP, "0.0.0.0", "0.0.0.0"),
    (kinds.IP, "010.0.0.1", "010.0.0.1"),
    (kinds.IP, "fd00::1", "fd00::1"),
    (kinds.IP, "", None),
    (kinds.STRING, "", ""),
    (kinds.STRING, "a=b, c", "a=b, c"),
    (kinds.STRINGS, "", []),
    (kinds.STRINGS, "a,b", ["a", "b"]),
    (kinds.STRINGS, '"a,b",c', ["a,b", "c"]),
    (kinds.MAP, "", {}),
    (kinds.MAP, "cpu=200m, memory = 1Gi,", {"cpu": "200m", "memory": "1Gi"}),
    (kinds.MAP, "a=b=c", {"a": "b=c"}),
    (kinds.LABELS, "role=web,edge", {"role": "web", "edge": ""}),
    (kinds.OPTION, "a=b,c", {"a": "b,c"}),
    (kinds.THRESHOLDS, "memory.available<1Gi,a<10%", {"memory.available": "1Gi", "a": "10%"}),
    (kinds.GATES, "A=true,B=0", {"A": True, "B": False}),
    (kinds.HEADERS, "a:1,b:2:3,a:4", {"a": ["1", "4"], "b": ["2:3"]}),
    (kinds.TAINTS, "", []),
    (kinds.TAINTS, "a=b:NoSchedule", [Taint(key="a", value="b", effect="NoSchedule")]),
    (kinds.TAINTS, "x.io/a:NoExecute", [Taint(key="x.io/a", value="", effect="NoExecute")]),
    (kinds.TAINTS, "a=:NoExecute,b:NoExecute", [Taint(key=key, effect="NoExecute") for key in "ab"]),
    (kinds.RESERVED_MEMORY, "", None),
    (
        kinds.RESERVED_MEMORY,
        "0:memory=1Gi,hugepages-1G=2048Mi;1:memory=1Gi",
        [
            MemoryReservation(numa_node=0, limits={"memory": "1Gi", "hugepages-1G": "2Gi"}),
            MemoryReservation(numa_node=1, limits={"memory": "1Gi"}),
        ],
    ),
    (kinds.QUANTITY, "1024Ki", "1Mi"),
    (kinds.LEVEL, "4", 4),
    (kinds.VMODULE, "a=4,b*=4,", [VModuleItem(file_pattern=name, verbosity=4) for name in ("a", "b*")]),
    (kinds.SEVERITY, "WARNING", 1),
    (kinds.SEVERITY, "error", 2),
    (kinds.SEVERITY, "3", 3),
    (kinds.TRACE_LOCATION, ":0", ":0"),
    (kinds.TRACE_LOCATION, "loop.py:64", "loop.py:64"),
    (kinds.VERSION, "true", "true"),
    (kinds.VERSION, "raw", "raw"),
    (kinds.VERSION, "0", "false"),
    (kinds.VERSION, "v1.36.0-mine", "v1.36.0-mine"),
]

BAD: list[tuple[FlagType, str]] = [
    *[(kinds.BOOL, text) for text in ("yes", "", "tRUE", " true", "2")],
    *[(kinds.INT32, text) for text in ("", "ten", "1.5", "08", "0x", "1__0", " 1", "٣")],
    *[(kinds.INT32, text) for text in ("2147483648", "-2147483649", "9" * 5000)],
    (kinds.INT, "9223372036854775808"),
    (kinds.UINT, "-1"),
    (kinds.UINT, "+1"),
    *[(kinds.DURATION, text) for text in ("", "10", "10 s", "soon", "1d")],
    *[(kinds.IP, text) for text in ("localhost", "10.0.0", "fe80::1%eth0", "10.0.0.0/8")],
    (kinds.STRINGS, '"a'),
    (kinds.MAP, "cpu"),
    (kinds.OPTION, ""),
    (kinds.THRESHOLDS, "memory.available=100Mi"),
    *[(kinds.GATES, text) for text in ("A", "A=yes", "A=")],
    (kinds.HEADERS, "a"),
    *[(kinds.TAINTS, text) for text in ("a", "a=b", "a=b:Never", "a=b=c:NoSchedule", "-:NoSchedule")],
    (kinds.TAINTS, "a:NoSchedule,a=b:NoSchedule"),
    *[
        (kinds.RESERVED_MEMORY, text)
        for text in ("memory=1Gi", "x:memory=1Gi", "0:memory", "0:cpu=1", "0:", ";")
    ],
    (kinds.RESERVED_MEMORY, "0:memory=much"),
    *[(kinds.QUANTITY, text) for text in ("", "much", "1KiB")],
    *[(kinds.LEVEL, text) for text in ("", "-1", "0x4", "2147483648")],
    *[(kinds.VMODULE, text) for text in ("loop", "=4", "loop=", "loop=x", "a=b=4")],
    *[(kinds.SEVERITY, text) for text in ("", "LOUD", "4")],
    *[(kinds.TRACE_LOCATION, text) for text in ("loop", "loop.py:0", "loop:1:2")],
    *[(kinds.VERSION, text) for text in ("", "1.36", "v1.35.0", "v1.36.0junk")],
]

ALL_KINDS = list({id(flag.kind): flag.kind for flag in FLAGS}.values())


@pytest.mark.parametrize(
    ("kind", "text", "value"), GOOD, ids=[f"{kind.name}-{text}" for kind, text, _ in GOOD]
)
def test_flag_type_parse_valid_text_returns_value(kind: FlagType, text: str, value: Any) -> None:
    assert kind.parse(text) == value


@pytest.mark.parametrize(("kind", "text"), BAD, ids=[f"{kind.name}-{text[:30]}" for kind, text in BAD])
def test_flag_type_parse_invalid_text_raises_one_line_error_with_remedy(kind: FlagType, text: str) -> None:
    with pytest.raises(ValueError) as caught:
        kind.parse(text)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    assert any(word in message for word in ("write", "such as", "from", "give it once"))


def test_flag_type_every_type_has_valid_and_invalid_samples() -> None:
    named = {kind.name for kind in ALL_KINDS}
    assert named == {kind.name for kind, *_ in GOOD}
    assert named - {"string"} == {kind.name for kind, _ in BAD}


@pytest.mark.parametrize(
    ("kind", "first", "later", "both"),
    [
        (kinds.STRINGS, "a,b", "c", ["a", "b", "c"]),
        (kinds.MAP, "a=1,b=2", "b=3", {"a": "1", "b": "3"}),
        (kinds.OPTION, "a=1", "b=2", {"a": "1", "b": "2"}),
        (kinds.HEADERS, "a:1", "a:2,b:3", {"a": ["1", "2"], "b": ["3"]}),
        (kinds.GATES, "A=true", "A=false", {"A": False}),
    ],
)
def test_flag_type_join_repeated_flag_accumulates_values(
    kind: FlagType, first: str, later: str, both: Any
) -> None:
    assert kind.join
    before = kind.parse(first)
    assert kind.join(before, kind.parse(later)) == both
    assert before == kind.parse(first), "joining must not change the first"


def test_flag_type_headers_invalid_value_omits_content() -> None:
    with pytest.raises(ValueError) as caught:
        kinds.HEADERS.parse("Authorization Bearer hunter2")
    assert "hunter2" not in str(caught.value)


@given(st.sampled_from(ALL_KINDS), st.text() | st.from_regex(r"[0-9a-zA-Z:=<,.;+\-_]{0,12}"))
def test_flag_type_parse_any_text_returns_value_or_value_error(kind: FlagType, text: str) -> None:
    try:
        value = kind.parse(text)
    except ValueError:
        return
    if value is not None:
        kind.show(value)


@pytest.mark.parametrize(
    ("kind", "text"),
    [(kind, text) for kind, text, value in GOOD if value and kind not in (kinds.OPTION, kinds.SEVERITY)],
)
def test_flag_type_show_parse_roundtrip(kind: FlagType, text: str) -> None:
    value = kind.parse(text)
    assert kind.parse(kind.show(value)) == value
