from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pykubelet.linux.dbus import (
    HEAD_BYTES,
    DBusProtocolError,
    Message,
    MessageType,
    Variant,
    decode,
    decode_message,
    encode,
    encode_message,
    message_size,
    split_signature,
)

KNOWN = [
    # The examples of the protocol's specification, and what its rules say for the rest.
    ("s", ("foo",), "03000000 666f6f00"),
    ("u", (1,), "01000000"),
    ("b", (True,), "01000000"),
    ("y", (7,), "07"),
    ("yu", (7, 8), "07000000 08000000"),
    ("n", (-2,), "feff"),
    ("x", (-1,), "ffffffffffffffff"),
    ("t", (2**64 - 1,), "ffffffffffffffff"),
    ("d", (1.5,), "000000000000f83f"),
    ("o", ("/a/b_1",), "06000000 2f612f625f31 00"),
    ("g", ("a{sv}",), "05 617b73767d 00"),
    ("ax", ([5],), "08000000 00000000 0500000000000000"),
    ("ax", ([],), "00000000 00000000"),
    ("ay", (b"\x01\x02",), "02000000 0102"),
    ("as", (["a", "bc"],), "0f000000 01000000 6100 0000 02000000 626300"),
    ("v", (Variant("u", 5),), "01 75 00 00 05000000"),
    ("v", (Variant("t", 5),), "01 74 00 0000000000 0500000000000000"),
    ("(yu)", ((1, 2),), "01000000 02000000"),
    ("a{sv}", ({"k": Variant("b", True)},), "10000000 00000000 01000000 6b00 01 62 00 000000 01000000"),
    ("a(sv)", ([("k", Variant("y", 9))],), "0a000000 00000000 01000000 6b00 01 79 00 09"),
]

HELLO = (
    "6c 01 00 01 00000000 01000000 6d000000"
    " 01 01 6f 00 15000000 2f6f72672f667265656465736b746f702f44427573 00 0000"
    " 02 01 73 00 14000000 6f72672e667265656465736b746f702e44427573 00 000000"
    " 03 01 73 00 05000000 48656c6c6f 00 0000"
    " 06 01 73 00 14000000 6f72672e667265656465736b746f702e44427573 00 000000"
)


@pytest.mark.parametrize(("signature", "values", "raw"), KNOWN)
def test_encode_and_decode_match_known_bytes(signature: str, values: tuple[Any, ...], raw: str) -> None:
    assert encode(signature, values).hex() == raw.replace(" ", "")
    assert decode(signature, bytes.fromhex(raw)) == values


def test_encode_message_hello_matches_known_bytes() -> None:
    """The first call that every client of a bus makes."""
    message = Message(
        kind=MessageType.CALL,
        serial=1,
        path="/org/freedesktop/DBus",
        interface="org.freedesktop.DBus",
        member="Hello",
        destination="org.freedesktop.DBus",
    )
    raw = bytes.fromhex(HELLO)
    assert encode_message(message).hex() == raw.hex()
    assert message_size(raw[:HEAD_BYTES]) == len(raw)
    assert decode_message(raw) == message


def test_decode_big_endian_is_supported() -> None:
    assert decode("sau", bytes.fromhex("00000001 61 00 0000 00000004 00000005"), big=True) == ("a", [5])
    raw = bytes.fromhex(
        "42 02 00 01 00000004 00000007 0000000f 05 01 75 00 00000003 08 01 67 00 01 75 00 00 0000002a"
    )
    assert decode_message(raw) == Message(
        kind=MessageType.RETURN, serial=7, reply_to=3, signature="u", body=(42,)
    )


@pytest.mark.parametrize(
    ("signature", "raw"),
    [
        ("s", "ff000000 666f6f00"),
        ("s", "03000000 666f6f01"),
        ("s", "03000000 66006f00"),
        ("s", "02000000 c32800"),
        ("b", "02000000"),
        ("u", "0100"),
        ("yu", "07010000 08000000"),
        ("ax", "07000000 00000000 0500000000000000"),
        ("au", "ffffffff"),
        ("o", "03000000 2f612f00"),
        ("v", "02 7575 00 05000000"),
        ("v", "01 7a 00 05000000"),
        ("u", "01000000 00"),
    ],
)
def test_decode_malformed_value_raises(signature: str, raw: str) -> None:
    with pytest.raises(DBusProtocolError):
        decode(signature, bytes.fromhex(raw))


@pytest.mark.parametrize(
    "signature", ["a", "(", "()", "a{s}", "a{vs}", "{sv}", "z", "a{sv", "(s))", "a" * 40 + "u", "s" * 256]
)
def test_split_signature_invalid_raises(signature: str) -> None:
    with pytest.raises(DBusProtocolError):
        split_signature(signature)


@pytest.mark.parametrize(
    ("signature", "values"),
    [
        ("u", (-1,)),
        ("u", ("1",)),
        ("y", (256,)),
        ("s", (5,)),
        ("s", ("a\0b",)),
        ("s", ("\ud800",)),
        ("o", ("a/b",)),
        ("o", ("/a//b",)),
        ("g", ("z",)),
        ("(uu)", ((1,),)),
        ("v", (Variant("uu", 1),)),
        ("v", (5,)),
        ("u", ()),
        ("as", (5,)),
    ],
)
def test_encode_value_not_matching_signature_raises(signature: str, values: tuple[Any, ...]) -> None:
    with pytest.raises(DBusProtocolError):
        encode(signature, values)


def test_encode_and_decode_too_deep_raises() -> None:
    value = Variant("u", 1)
    for _ in range(80):
        value = Variant("v", value)
    with pytest.raises(DBusProtocolError, match="deep"):
        encode("v", (value,))
    raw = b"\x01v\x00" * 80 + b"\x01u\x00"
    with pytest.raises(DBusProtocolError, match="deep"):
        decode("v", raw + bytes(-len(raw) % 4) + bytes(4))


# Values with their type

_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=12)
_BASIC: dict[str, st.SearchStrategy[Any]] = {
    "y": st.integers(0, 2**8 - 1),
    "b": st.booleans(),
    "n": st.integers(-(2**15), 2**15 - 1),
    "q": st.integers(0, 2**16 - 1),
    "i": st.integers(-(2**31), 2**31 - 1),
    "u": st.integers(0, 2**32 - 1),
    "x": st.integers(-(2**63), 2**63 - 1),
    "t": st.integers(0, 2**64 - 1),
    "d": st.floats(allow_nan=False),
    "s": _TEXT,
    "o": st.lists(st.from_regex(r"[A-Za-z0-9_]{1,5}", fullmatch=True), max_size=3).map(
        lambda parts: "/" + "/".join(parts)
    ),
    "g": st.sampled_from(["", "s", "a{sv}", "(yyu)at"]),
}


def _values_of(kind: str) -> st.SearchStrategy[Any]:
    if kind in _BASIC:
        return _BASIC[kind]
    if kind == "v":
        return st.sampled_from(["u", "s", "as", "(yt)", "a{sv}", "v"]).flatmap(
            lambda inner: (
                st.builds(Variant, st.just(inner), _values_of("u" if inner == "v" else inner))
                if inner != "v"
                else st.builds(Variant, st.just("v"), st.builds(Variant, st.just("q"), _BASIC["q"]))
            )
        )
    if kind == "ay":
        return st.binary(max_size=20)
    if kind.startswith("a{"):
        return st.dictionaries(_values_of(kind[2]), _values_of(kind[3:-1]), max_size=3)
    if kind[0] == "a":
        return st.lists(_values_of(kind[1:]), max_size=4)
    return st.tuples(*(_values_of(part) for part in split_signature(kind[1:-1])))


_KINDS = st.recursive(
    st.sampled_from([*_BASIC, "v"]),
    lambda inner: st.one_of(
        inner.map("a{}".format),
        st.lists(inner, min_size=1, max_size=3).map(lambda parts: f"({''.join(parts)})"),
        st.tuples(st.sampled_from([*_BASIC]), inner).map(lambda pair: f"a{{{pair[0]}{pair[1]}}}"),
    ),
    max_leaves=5,
)
_TYPED = st.lists(_KINDS, max_size=4).flatmap(
    lambda kinds: st.tuples(st.just("".join(kinds)), st.tuples(*(_values_of(kind) for kind in kinds)))
)


@given(_TYPED)
def test_decode_any_encoded_values_round_trip(typed: tuple[str, tuple[Any, ...]]) -> None:
    signature, values = typed
    assert decode(signature, encode(signature, values)) == values


@given(_TYPED, st.integers(1, 2**32 - 1), _TEXT, _BASIC["o"])
def test_decode_message_any_encoded_message_round_trips(
    typed: tuple[str, tuple[Any, ...]], serial: int, word: str, path: str
) -> None:
    message = Message(
        kind=MessageType.SIGNAL,
        serial=serial,
        path=path,
        interface=word,
        member=word,
        sender=word,
        signature=typed[0],
        body=typed[1],
    )
    raw = encode_message(message)
    assert message_size(raw[:HEAD_BYTES]) == len(raw)
    assert decode_message(raw) == message


@given(st.binary(max_size=80), _TYPED)
def test_decode_arbitrary_bytes_raises_only_protocol_error(
    raw: bytes, typed: tuple[str, tuple[Any, ...]]
) -> None:
    for signature in (typed[0], "a(sv)", "a{sv}ov"):
        try:
            decode(signature, raw)
        except DBusProtocolError:
            continue


@given(st.data())
def test_decode_message_corrupted_raises_only_protocol_error(data: st.DataObject) -> None:
    raw = bytearray(bytes.fromhex(HELLO))
    at = data.draw(st.integers(0, len(raw) - 1))
    raw[at] = data.draw(st.integers(0, 255))
    try:
        decode_message(bytes(raw))
    except DBusProtocolError:
        return
