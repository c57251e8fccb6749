"""Quantities: exact amounts, rounded and capped and written as Kubernetes does."""

from decimal import ROUND_UP, Decimal, localcontext

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.quantity import Notation, Quantity

CASES = [
    # text, canonical text, whole units, milli-units
    ("0", "0", 0, 0),
    ("-0", "0", 0, 0),
    ("0Ki", "0", 0, 0),
    ("1", "1", 1, 1000),
    ("+1", "1", 1, 1000),
    ("100m", "100m", 1, 100),
    ("0.1", "100m", 1, 100),
    (".5", "500m", 1, 500),
    ("1.", "1", 1, 1000),
    ("1.5", "1500m", 2, 1500),
    ("-1.5", "-1500m", -2, -1500),
    ("1000m", "1", 1, 1000),
    ("1500m", "1500m", 2, 1500),
    ("64Mi", "64Mi", 64 * 2**20, 64000 * 2**20),
    ("1024Mi", "1Gi", 2**30, 1000 * 2**30),
    ("1.5Gi", "1536Mi", 1536 * 2**20, 1536000 * 2**20),
    ("0.5Ki", "512", 512, 512000),
    ("0.1Ki", "102400m", 103, 102400),
    ("1000M", "1G", 10**9, 10**12),
    ("1k", "1k", 1000, 10**6),
    ("1E", "1E", 10**18, 10**21),
    ("1Ei", "1Ei", 2**60, 1000 * 2**60),
    ("1e3", "1e3", 1000, 10**6),
    ("1E3", "1e3", 1000, 10**6),
    ("12e6", "12e6", 12 * 10**6, 12 * 10**9),
    ("1e4", "10e3", 10**4, 10**7),
    ("1e+2", "100", 100, 10**5),
    ("1e-3", "1e-3", 1, 1),
    ("1n", "1n", 1, 1),
    ("0.1n", "1n", 1, 1),
    ("-0.1n", "-1n", -1, -1),
    ("0.0000000001", "1n", 1, 1),
    ("1e-300", "1e-9", 1, 1),
    ("1u", "1u", 1, 1),
    ("9223372036854775807", "9223372036854775807", 2**63 - 1, (2**63 - 1) * 1000),
    ("9223372036854775808", "9223372036854775807", 2**63 - 1, (2**63 - 1) * 1000),
    ("100Ei", "9223372036854775807", 2**63 - 1, (2**63 - 1) * 1000),
    ("-100Ei", "-9223372036854775807", -(2**63 - 1), -(2**63 - 1) * 1000),
    ("1e300", "9223372036854775807", 2**63 - 1, (2**63 - 1) * 1000),
    ("0e999999999999", "0", 0, 0),
]


@pytest.mark.parametrize(("text", "canonical", "units", "milli"), CASES, ids=[case[0] for case in CASES])
def test_quantity_parse_canonical_text_units_and_milli(
    text: str, canonical: str, units: int, milli: int
) -> None:
    quantity = Quantity.parse(text)
    assert str(quantity) == canonical
    assert int(quantity) == units
    assert quantity.milli == milli


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "+",
        "-",
        ".",
        "Ki",
        "m",
        "1Q",
        "1K",
        "1ki",
        "1KI",
        "1mm",
        "1e",
        "1e1.5",
        "e3",
        "0x10",
        "1 Gi",
        " 1",
        "1,5",
        "--1",
        "+-1",
        "1Ki5",
        "\u0661",
        "1e5Ki",
        "NaN",
        "Infinity",
        "1\n",
        "9" * 5000,
        "1e" + "9" * 5000,
    ],
)
def test_quantity_parse_invalid_text_raises_short_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="is not a quantity: write") as caught:
        Quantity.parse(text)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 200


def test_quantity_comparison_independent_of_notation() -> None:
    assert Quantity.parse("1Ki") == Quantity.parse("1024") == Quantity.parse("1024000m")
    assert hash(Quantity.parse("1Ki")) == hash(Quantity.parse("1024"))
    assert Quantity.parse("1G") < Quantity.parse("1Gi") <= Quantity.parse("1024Mi")
    assert max(Quantity.parse("900m"), Quantity.parse("1")) == Quantity.from_units(1)
    assert str(Quantity.from_units(2**30, "binary")) == "1Gi"
    assert Quantity.parse("1Ki").is_integer
    assert not Quantity.parse("1500m").is_integer


NOTATIONS: st.SearchStrategy[Notation] = st.sampled_from(["decimal", "binary", "exponent"])


@given(st.integers(-(2**63 - 1) * 10**9, (2**63 - 1) * 10**9), NOTATIONS)
def test_quantity_str_parse_roundtrip(nanos: int, notation: Notation) -> None:
    quantity = Quantity(nanos, notation)
    again = Quantity.parse(str(quantity))
    assert again == quantity
    assert str(Quantity.parse(str(again))) == str(again)


@given(
    st.text()
    | st.from_regex(r"[+-]?[0-9.]{0,40}([KMGTPE]i|[numkMGTPE]|[eE][+-]?[0-9]{1,12})?", fullmatch=True)
)
def test_quantity_parse_any_text_in_range_or_value_error(text: str) -> None:
    try:
        quantity = Quantity.parse(text)
    except ValueError:
        return
    assert abs(quantity.nanos) <= (2**63 - 1) * 10**9
    assert Quantity.parse(str(quantity)) == quantity


@given(st.decimals(-(10**12), 10**12, allow_nan=False, places=15), st.sampled_from(["", "k", "m", "Ki"]))
def test_quantity_parse_excess_precision_rounded_away_from_zero(number: Decimal, suffix: str) -> None:
    factor = {"": Decimal(1), "k": Decimal(1000), "m": Decimal("0.001"), "Ki": Decimal(1024)}[suffix]
    with localcontext() as context:
        context.prec = 100
        expected = (number * factor * 10**9).to_integral_value(ROUND_UP)
    assert Quantity.parse(f"{number:f}{suffix}").nanos == expected
