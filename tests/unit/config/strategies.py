"""Configurations for property tests: anything that a file can express, sensible or not."""

from typing import Annotated, Any, get_args, get_origin, get_type_hints

import msgspec
from hypothesis import strategies as st

from pykubelet.api.duration import Duration
from pykubelet.api.quantity import Quantity
from pykubelet.config.types import IntRange, PointerMark, QuantityMark

TEXT = st.text(
    st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=6
) | st.sampled_from(
    [
        "y",
        "no",
        "null",
        "~",
        "1e3",
        "010",
        "0o7",
        "1_0",
        "<<",
        "=",
        "- a",
        "a: b",
        "#",
        " a ",
        "10%",
        "2020-01-01",
        "*a",
    ]
)


def values(hint: Any, marks: tuple[Any, ...] = ()) -> st.SearchStrategy[Any]:
    """Make values of a field's type that a file can express."""
    if get_origin(hint) is Annotated:
        return values(hint.__origin__, (*marks, *hint.__metadata__))
    if type(None) in get_args(hint):
        [inner] = [part for part in get_args(hint) if part is not type(None)]
        return st.none() | values(inner, marks)
    if get_origin(hint) is list:
        return st.lists(values(get_args(hint)[0]), max_size=3)
    if get_origin(hint) is dict:
        return st.dictionaries(TEXT, values(get_args(hint)[1]), max_size=3)
    if issubclass(hint, msgspec.Struct):
        return structs(hint)
    if hint is int:
        [limits] = [mark for mark in marks if isinstance(mark, IntRange)]
        return st.integers(limits.low, limits.high)
    if hint is Duration:
        return st.integers(-(2**63), 2**63 - 1).map(Duration)
    if any(isinstance(mark, QuantityMark) for mark in marks):
        return st.integers(-(10**20), 10**20).map(lambda nanos: str(Quantity(nanos)))
    return {bool: st.booleans(), float: st.floats(-1e9, 1e9), str: TEXT}[hint]


def structs(cls: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = get_type_hints(cls, include_extras=True)
    given_fields = {}
    for field in msgspec.structs.fields(cls):
        hint = hints[field.name]
        strategy = values(hint)
        default = None if field.default is msgspec.NODEFAULT else field.default
        if default and PointerMark() not in getattr(hint, "__metadata__", ()):
            # A zero here would mean the default, so no file can say it.
            strategy = strategy.filter(bool)
        given_fields[field.name] = (
            st.just(field.default) if field.name in ("kind", "api_version") else strategy
        )
    return st.fixed_dictionaries({}, optional=given_fields).map(lambda chosen: cls(**chosen))
