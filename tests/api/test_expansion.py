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
def test_expansion(text: str, result: str) -> None:
    assert expand(text, VARIABLES, FALLBACK) == result


@given(st.text(alphabet="$()AB \n"), st.dictionaries(st.text(alphabet="$(AB"), st.text(max_size=20)))
def test_expansion_never_fails_and_knows_escapes(text: str, variables: dict[str, str]) -> None:
    expand(text, variables)
    assert expand(text.replace("$", "$$"), variables) == text


@given(st.text(alphabet=st.characters(exclude_characters="$")))
def test_text_without_a_dollar_stays(text: str) -> None:
    assert expand(text, VARIABLES) == text


def test_a_bomb_is_refused() -> None:
    variables = {"V0": "x" * 1000}
    with pytest.raises(ExpansionTooLongError, match="more than"):
        for level in range(40):
            variables[f"V{level + 1}"] = expand(f"$(V{level})$(V{level})", variables)
    assert max(map(len, variables.values())) <= LONGEST + 2000


def test_many_openings_take_no_long_time() -> None:
    text = "$(" * 500_000
    assert expand(text, VARIABLES) == text
    assert expand(text + ")", VARIABLES) == text + ")"
