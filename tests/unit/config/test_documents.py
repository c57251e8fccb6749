"""Reading files: YAML as Kubernetes reads it, and one clear line for everything that is wrong."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pykubelet.config.documents import (
    MAX_BYTES,
    MAX_DEPTH,
    depth_of,
    plain_value,
    read_document,
    read_text_document,
)
from pykubelet.config.errors import ConfigError


def problems_of(text: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        read_text_document(text, "file")
    return [str(problem) for problem in caught.value.problems]


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("yes", True),
        ("Yes", True),
        ("y", True),
        ("on", True),
        ("TRUE", True),
        ("tRUE", "tRUE"),
        ("no", False),
        ("n", False),
        ("Off", False),
        ("false", False),
        ("", None),
        ("~", None),
        ("null", None),
        ("nUll", "nUll"),
        ("5", 5),
        ("+5", 5),
        ("-5", -5),
        ("0", 0),
        ("010", 8),
        ("-010", -8),
        ("0o17", 15),
        ("0x1F", 31),
        ("0b101", 5),
        ("1_000", 1000),
        ("_5", "_5"),
        ("._5", "._5"),
        ("08", 8),
        ("1e3", 1000),
        ("1.0", 1),
        ("1.5", 1.5),
        (".5", 0.5),
        ("-.5e1", -5),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("1e999", "1e999"),
        ("1:30", "1:30"),
        ("2020-01-02", "2020-01-02"),
        ("0x", "0x"),
        ("1.2.3", "1.2.3"),
        ("10Mi", "10Mi"),
        ("10%", "10%"),
        ("9" * 30, int("9" * 30)),
        ("9" * 5000, "9" * 5000),
        ("=", "="),
    ],
)
def test_plain_value_yaml_scalars_match_kubernetes(word: str, value: object) -> None:
    assert plain_value(word) == value
    assert type(plain_value(word)) is type(value)
    assert read_text_document(f"a: {word}", "file") == {"a": value}
    assert read_text_document(f'a: "{word}"', "file") == {"a": word}
    assert read_text_document(f"a: !!str {word}", "file") == {"a": word}


def test_read_text_document_nan_is_float_nan() -> None:
    assert math.isnan(read_text_document("a: .nan", "file")["a"])


@pytest.mark.parametrize(
    ("text", "document"),
    [
        ("a: 1", {"a": 1}),
        ("# comment\n---\na: 1\n...\n", {"a": 1}),
        ("a: 1\n---\n# nothing more\n", {"a": 1}),
        ("\ufeffa: 1", {"a": 1}),
        ('{"a": {"b": [1, 2.5, null, true, "x"]}}', {"a": {"b": [1, 2.5, None, True, "x"]}}),
        ("{a: 1, b: [x, 'y']}", {"a": 1, "b": ["x", "y"]}),
        ("1: a\nyes: b\n1.5: c\n", {"1": "a", "true": "b", "1.5": "c"}),
        ("a: &x {b: 1}\nc: *x\n", {"a": {"b": 1}, "c": {"b": 1}}),
        ("a: &x {b: 1, c: 2}\nd: {<<: *x, c: 3}\n", {"a": {"b": 1, "c": 2}, "d": {"b": 1, "c": 3}}),
        ("d: {<<: [{a: 1}, {a: 2, b: 3}], c: 4}", {"d": {"a": 1, "b": 3, "c": 4}}),
        ("'<<': 1", {"<<": 1}),
        ("a: !custom text\nb: !!binary aGk=", {"a": "text", "b": "aGk="}),
        ("a: |\n  two\n  lines\n", {"a": "two\nlines\n"}),
        (r'{"a": "\ud83d\ude00"}', {"a": "😀"}),
        ('{"' + "k" * 3000 + '": 1}', {"k" * 3000: 1}),
        ('{"a": 110.0}', {"a": 110.0}),
    ],
)
def test_read_text_document_valid_yaml_or_json_returns_mapping(text: str, document: dict[str, Any]) -> None:
    assert read_text_document(text, "file") == document


def test_read_text_document_aliases_are_independent_copies() -> None:
    document = read_text_document("a: &x [1]\nb: *x", "file")
    document["a"].append(2)
    assert document["b"] == [1]


BOMB = "a0: &a0 [1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{level}: &a{level} [{','.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 20)
)
LADDER = (
    "a0: &a0 "
    + "[" * 90
    + "]" * 90
    + "\n"
    + "".join(f"a{level}: &a{level} {'[' * 90}*a{level - 1}{']' * 90}\n" for level in range(1, 60))
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "file: is empty: "),
        ("# only a comment\n", "file: is empty: "),
        ("---\n", "file: is empty: "),
        ("null", "file: is empty: "),
        ("a\0b", "file: is binary, not text: "),
        ("[1, 2]", "file: is not a mapping of fields: "),
        ("just text", "file: is not a mapping of fields: "),
        ("5", "file: is not a mapping of fields: "),
        ("a: 1\n---\nb: 2\n---\nc: 3\n", "file: has 3 documents: "),
        ("a: b: c", "file: line 1: is neither YAML nor JSON: "),
        ("a: 1\nb: [1,\nc: 2\n", "while parsing a flow sequence from line 2"),
        ("a:\n\t- b", "; indent with spaces, not tabs"),
        ('{"a": 1', "while parsing a flow mapping from line 1"),
        (r'{"a": "\ud83d"}', "file: line 1: is neither YAML nor JSON: "),
        ("a: \x01", "file: holds characters that YAML does not allow: "),
        ("a: \ud800", "file: holds characters that YAML does not allow: "),
        ("? [a]\n: b", "file: line 1: a key must be text"),
        ("? {a: 1}\n: b", "file: line 1: a key must be text"),
        ("a: *x", "file: line 1: a * refers to no & that ends before it"),
        ("a: &x [*x]", "file: line 1: a * refers to no & that ends before it"),
        ("a: 1\n<<: [1]", "file: line 2: << takes a mapping or a list of mappings"),
        (BOMB, "unfolds to more than"),
        (LADDER, f"is nested more than {MAX_DEPTH} levels deep"),
        ("[" * 5000, f"file: line 1: is nested more than {MAX_DEPTH} levels deep"),
        ('{"a":' * 5000 + "1" + "}" * 5000, f"file: line 1: is nested more than {MAX_DEPTH} levels deep"),
        ('{"a":' * 101 + "1" + "}" * 101, f"file: line 1: is nested more than {MAX_DEPTH} levels deep"),
        ("- a\n" * 300_000, "unfolds to more than"),
    ],
    ids=range(27),
)
def test_read_text_document_invalid_text_raises_one_line_error(text: str, expected: str) -> None:
    [problem] = problems_of(text)
    assert expected in problem
    assert "\n" not in problem
    assert len(problem) < 300


def test_read_text_document_repeated_keys_reported_with_path_and_lines() -> None:
    text = "a: 1\nb:\n  c: {d: 1, d: 2}\na: 2\nl:\n- x: 1\n  y.z: 2\n  y.z: 3\na: 3\n"
    assert problems_of(text) == [
        "file: line 3: b.c.d is repeated, first on line 3: keep one of them",
        "file: line 4: a is repeated, first on line 1: keep one of them",
        "file: line 8: l[0][y.z] is repeated, first on line 7: keep one of them",
        "file: line 9: a is repeated, first on line 1: keep one of them",
    ]
    assert problems_of('{"a": 1,\n "a": 2}') == [
        "file: line 2: a is repeated, first on line 1: keep one of them"
    ]


def refusal(path: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        read_document(path)
    [problem] = caught.value.problems
    assert problem.path == str(path)
    return problem.message


def test_read_document_unusable_path_or_content_raises_config_error(tmp_path: Path) -> None:
    good = tmp_path / "good.yaml"
    good.write_text("kind: X\n")
    assert read_document(good) == {"kind": "X"}
    assert refusal(tmp_path / "none").startswith("does not exist: ")
    assert refusal(tmp_path).startswith("is a folder: ")
    assert refusal(good / "below").startswith("cannot be read, Not a directory: ")
    assert refusal(tmp_path / ("x" * 300)).startswith("cannot be read, File name too long: ")
    assert refusal(Path("a\0b")).startswith("is not a path, ")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    assert refusal(loop).startswith("cannot be read, Too many levels of symbolic links: ")
    (tmp_path / "empty").touch()
    assert refusal(tmp_path / "empty").startswith("is empty: ")
    (tmp_path / "binary").write_bytes(b"\x7fELF\x02\x01\xff\xfe")
    assert refusal(tmp_path / "binary").startswith("is binary, not text: ")
    (tmp_path / "nul").write_bytes(b"a: b\0")
    assert refusal(tmp_path / "nul").startswith("is binary, not text: ")
    (tmp_path / "latin").write_bytes("a: é".encode("latin-1"))
    assert refusal(tmp_path / "latin").startswith("is binary, not text: ")
    (tmp_path / "utf16").write_text("a: 1", encoding="utf-16")
    assert refusal(tmp_path / "utf16").startswith("is binary, not text: ")
    with (tmp_path / "large").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    assert refusal(tmp_path / "large").startswith("is larger than 10 MiB: ")


def test_read_document_endless_device_rejected_as_too_large() -> None:
    assert refusal(Path("/dev/zero")).startswith("is larger than 10 MiB: ")


def test_read_document_unreadable_file_reports_permission_denied(tmp_path: Path) -> None:
    (tmp_path / "secret").touch(mode=0)
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    try:
        message = refusal(tmp_path / "secret")
    finally:
        os.seteuid(user)
    assert message.startswith("cannot be read, permission denied: ")


@settings(max_examples=300)
@given(st.binary() | st.text(alphabet="ab:- {}[]&*<>!'\"\n\t#?|,0.1~\\x", max_size=40).map(str.encode))
def test_read_document_any_bytes_yield_mapping_or_config_error(
    tmp_path_factory: pytest.TempPathFactory, data: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "fuzz"
    path.write_bytes(data)
    try:
        document = read_document(path)
    except ConfigError as err:
        lines = str(err).splitlines()
    else:
        lines = []
        assert isinstance(document, dict)
        assert all(isinstance(key, str) for key in document)
        assert depth_of(document) <= MAX_DEPTH
    assert all(line.startswith(f"{path}: ") and len(line) > len(str(path)) + 10 for line in lines)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(st.text(), JSON_VALUES))
def test_read_text_document_any_json_decoded_as_json(document: dict[str, Any]) -> None:
    if "\\u0000" not in json.dumps(document):
        assert read_text_document(json.dumps(document), "file") == document
        assert read_text_document(json.dumps(document, indent=2, ensure_ascii=False), "file") == document
