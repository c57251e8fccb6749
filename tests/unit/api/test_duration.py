"""Durations: read and written as Go's time package does."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.duration import Duration

SECOND = 10**9


@pytest.mark.parametrize(
    ("text", "nanos"),
    [
        ("0", 0),
        ("+0", 0),
        ("-0", 0),
        ("0s", 0),
        ("5s", 5 * SECOND),
        ("+5s", 5 * SECOND),
        ("-5s", -5 * SECOND),
        ("1m30s", 90 * SECOND),
        ("1h2m3.5s", 3723 * SECOND + SECOND // 2),
        ("100ms", SECOND // 10),
        ("1.s", SECOND),
        (".5s", SECOND // 2),
        ("12us", 12_000),
        ("12µs", 12_000),
        ("12μs", 12_000),
        ("1.5ns", 1),
        ("0.9ns0.9ns", 0),
        ("39h9m14.425s", 140954425 * SECOND // 1000),
        ("9007199254.740993s", 9007199254740993000),
        ("9223372036854775807ns", 2**63 - 1),
        ("-9223372036854775808ns", -(2**63)),
    ],
)
def test_duration_parse_valid_text_returns_nanoseconds(text: str, nanos: int) -> None:
    assert Duration.parse(text) == nanos


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "+",
        "s",
        ".",
        ".s",
        "3",
        "1.5",
        "3000",
        "1d",
        "1 s",
        " 1s",
        "1s ",
        "1h-1m",
        "--1s",
        "+-1s",
        "1S",
        "\u0661s",
        "1e3s",
        "9223372036854775808ns",
        "-9223372036854775809ns",
        "3000000h",
        "9" * 5000 + "s",
        "1" * 300,
    ],
)
def test_duration_parse_invalid_text_raises_short_value_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as|longest") as caught:
        Duration.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("nanos", "text"),
    [
        (0, "0s"),
        (1, "1ns"),
        (1_100, "1.1µs"),
        (2_200_000, "2.2ms"),
        (100_000_000, "100ms"),
        (SECOND, "1s"),
        (3 * SECOND + SECOND // 10**3, "3.001s"),
        (60 * SECOND, "1m0s"),
        (90 * SECOND, "1m30s"),
        (3600 * SECOND, "1h0m0s"),
        (-(4 * 3600 * SECOND), "-4h0m0s"),
        (2**63 - 1, "2562047h47m16.854775807s"),
        (-(2**63), "-2562047h47m16.854775808s"),
    ],
)
def test_duration_str_matches_go(nanos: int, text: str) -> None:
    assert str(Duration(nanos)) == text
    assert f"{Duration(nanos)}" == text


def test_duration_from_seconds_and_repr() -> None:
    assert Duration.from_seconds(1.5).seconds == 1.5
    assert repr(Duration.from_seconds(90)) == "Duration('1m30s')"


@given(st.integers(-(2**63), 2**63 - 1))
def test_duration_str_parse_roundtrip(nanos: int) -> None:
    assert Duration.parse(str(Duration(nanos))) == nanos


@given(st.text() | st.from_regex(r"[-+]?([0-9.]{0,5}(ns|us|ms|s|m|h)?){0,4}", fullmatch=True))
def test_duration_parse_any_text_in_range_or_value_error(text: str) -> None:
    try:
        span = Duration.parse(text)
    except ValueError:
        return
    assert -(2**63) <= span < 2**63
