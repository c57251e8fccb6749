import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.api.downward_api import LONGEST, ExpansionTooLongError, expand

VARIABLES = {"A": "a", "B": "$(A)", "EMPTY": "", "with space": "s", "$(A": "odd"}
FALLBACK = {"A": "not me", "C": "c"}


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("", ""),
        ("plain", "plain"),
        ("$(A)", "a"),
        ("x$(A)y$(C)z", "xaycz"),
        ("$(B)", "$(A)"),  # Values are not expanded again.
        ("$(EMPTY)", ""),
        ("$(MISSING)", "$(MISSING)"),
        ("$()", "$()"),
        ("$$(A)", "$(A)"),
        ("$$$(A)", "$a"),
        ("$$$$(A)", "$$(A)"),
        ("$$", "$"),
        ("$", "$"),
        ("$A", "$A"),
        ("$(A", "$(A"),
        ("$(A$$", "$(A$"),
        ("$($(A))", "odd)"),
        ("$(with space)", "s"),
        ("a$(", "a$("),
        ("(A)$", "(A)$"),
        ("${A}", "${A}"),
        ("é$(A)é", "éaé"),
        ("$(A)\n$(A)", "a\na"),
    ],
)
def test_expand_references_and_escapes(text: str, result: str) -> None:
    assert expand(text, VARIABLES, FALLBACK) == result


@given(st.text(alphabet="$()AB \n"), st.dictionaries(st.text(alphabet="$(AB"), st.text(max_size=20)))
def test_expand_any_text_never_raises_and_escaped_dollar_roundtrips(
    text: str, variables: dict[str, str]
) -> None:
    expand(text, variables)
    assert expand(text.replace("$", "$$"), variables) == text


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_expand_text_without_dollar_unchanged(text: str) -> None:
    assert expand(text, VARIABLES) == text


def test_expand_exponential_growth_raises_expansion_too_long() -> None:
    variables = {"V0": "x" * 1000}
    with pytest.raises(ExpansionTooLongError, match="more than"):
        for level in range(40):
            variables[f"V{level + 1}"] = expand(f"$(V{level})$(V{level})", variables)
    assert max(map(len, variables.values())) <= LONGEST + 2000


def test_expand_many_unclosed_references_linear_time() -> None:
    text = "$(" * 500_000
    assert expand(text, VARIABLES) == text
    assert expand(text + ")", VARIABLES) == text + ")"
