import json
import logging
import re
import time
from typing import Any

import pytest

from pykubelet.logs.formats import JSONFormatter, TextFormatter
from pykubelet.logs.mask import MASK, REST, mask_text, mask_value

HEADER = re.compile(r"^[IWEF]\d{4} \d\d:\d\d:\d\d\.\d{6} +\d+ [\w.]+:\d+\] ")


def record(message: str, level: int = logging.INFO, **keys: Any) -> logging.LogRecord:
    made = logging.LogRecord("pykubelet.podworkers.loop", level, "/src/sync/loop.py", 64, message, None, None)
    made.process = 23137
    made.klog_keys = keys
    return made


def test_text_formatter_line_has_klog_format() -> None:
    made = record("Pod started", pod="default/web", restarts=2, ready=True, reason=None)
    made.created = 1.643307
    line = TextFormatter().format(made)
    assert HEADER.match(line)
    assert re.match(r"^I0101 \d\d:\d\d:01\.643307   23137 loop\.py:64\] ", line)
    assert line.endswith('"Pod started" pod="default/web" restarts=2 ready=true reason=nil')


@pytest.mark.parametrize(
    ("level", "letter"),
    [(logging.INFO, "I"), (16, "I"), (logging.WARNING, "W"), (logging.ERROR, "E"), (logging.CRITICAL, "F")],
)
def test_text_formatter_level_sets_severity_letter(level: int, letter: str) -> None:
    assert TextFormatter().format(record("x", level)).startswith(letter)


def test_text_formatter_options_omit_header_and_add_directory() -> None:
    assert TextFormatter(headers=False).format(record("x")) == '"x"'
    assert " sync/loop.py:64] " in TextFormatter(directories=True).format(record("x"))


def test_text_formatter_line_break_does_not_forge_line() -> None:
    line = TextFormatter().format(record("a\nE0101 forged", pod="a\nE0101 forged"))
    assert not any(part.startswith("E0101") for part in line.split("\n"))


def test_json_formatter_line_has_klog_fields() -> None:
    document = json.loads(JSONFormatter().format(record("Pod started", 16, pod="default/web")))
    assert document["msg"] == "Pod started"
    assert document["v"] == 4
    assert document["pod"] == "default/web"
    assert document["caller"] == "sync/loop.py:64"
    assert document["ts"] > 1e12
    failed = json.loads(JSONFormatter().format(record("Oops", logging.ERROR, err=OSError(2, "gone"))))
    assert "v" not in failed
    assert failed["err"] == "[Errno 2] gone"


def test_formatters_traceback_is_logged_and_masked() -> None:
    try:
        raise ValueError("Bearer abcdefghijklmn")
    except ValueError as err:
        made = record("Bug", logging.ERROR)
        made.exc_info = (type(err), err, err.__traceback__)
    for formatter in (TextFormatter(), JSONFormatter()):
        line = formatter.format(made)
        assert "test_formats.py" in line
        assert "abcdefghijklmn" not in line


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("token", "s3cr3t"),
        ("password", "s3cr3t"),
        ("Authorization", "s3cr3t"),
        ("manifest-url-header", "X-Key:s3cr3t"),
        ("staticPodURLHeader", {"X-Key": ["s3cr3t"]}),
        ("headers", {"Authorization": "s3cr3t", "Cookie": ["s3cr3t"]}),
        ("storage-driver-password", "s3cr3t"),
        ("clientSecret", "s3cr3t"),
    ],
)
def test_formatters_secret_key_value_is_masked(key: str, value: object) -> None:
    for formatter in (TextFormatter(), JSONFormatter()):
        line = formatter.format(record("x", logging.INFO, **{key: value}))
        assert "s3cr3t" not in line
        assert MASK in line


@pytest.mark.parametrize(
    "text",
    [
        "Authorization: Bearer s3cr3ts3cr3t",
        "proxy http://me:s3cr3t@proxy:3128/",
        "eyJhbGciOiJSUzI1NiJ9.s3cr3tpayload.s3cr3t",
        "-----BEGIN RSA PRIVATE KEY-----\ns3cr3t\n-----END RSA PRIVATE KEY-----",
    ],
)
@pytest.mark.parametrize("formatter", [TextFormatter(), JSONFormatter()], ids=["text", "json"])
def test_formatters_secret_pattern_is_masked(formatter: logging.Formatter, text: str) -> None:
    assert "s3cr3t" not in mask_text(text)
    for value in (text, ValueError(text), text.encode()):
        for nested in (value, [value], (value,), {"a": value}, {"a": [{"b": (value, 1)}]}, {text: 1}):
            line = formatter.format(record("x", other=nested))
            assert "s3cr3t" not in line
            assert MASK in line
    assert "s3cr3t" not in formatter.format(record(text))


def test_mask_value_nested_secret_keys_masked() -> None:
    value = [{"env": [{"name": "A", "password": "s3cr3t"}]}, {"token": {"deep": ["s3cr3t", 5]}}]
    masked = mask_value("containers", value)
    assert masked == [{"env": [{"name": "A", "password": MASK}]}, {"token": {"deep": MASK}}]


def test_mask_value_numbers_and_names_unchanged() -> None:
    value = {"count": 3, "ratio": 0.5, "ready": True, "none": None, "url": "http://10.0.0.1:8080/healthz"}
    assert mask_value("status", value) == value
    assert mask_text("version 1.36.3 of a.b.c, my-eyJ.file.txt") == "version 1.36.3 of a.b.c, my-eyJ.file.txt"
    assert mask_text("my-eyJhbGciOiJSUzI1NiJ9.s3cr3t.s3cr3t.") == f"my-{MASK}."


@pytest.mark.parametrize(
    "part",
    [
        *(
            "eyJaaaaaaaa-",
            "eyJaaaaaaaa.-",
            "a.b.",
            "-----BEGIN ",
            "-----BEGIN RSA PRIVATE KEY-----",
            "-",
            " ",
        ),
        *("://a:", "://user:word", ":", "bearer ", "basic  ", "Bearer" + " " * 50),
    ],
)
def test_mask_text_long_text_linear_time(part: str) -> None:
    started = time.process_time()
    mask_text(part * (1_000_000 // len(part)))
    assert time.process_time() - started < 5


def test_mask_value_large_and_deep_values_bounded() -> None:
    deep: Any = "Bearer s3cr3ts3cr3t"
    for _ in range(200):
        deep = [deep]
    line = JSONFormatter().format(record("x", deep=deep))
    assert "s3cr3t" not in line
    wide = {"items": [{"n": number} for number in range(100_000)], "rest": list(range(100_000))}
    line = TextFormatter().format(record("x", wide=wide))
    assert REST in line
    assert len(line) < 200_000


@pytest.mark.parametrize("key", ["secretName", "tokenFile", "pod", "imagePullSecretsName", "tokenttl"])
def test_mask_value_secret_name_keys_unchanged(key: str) -> None:
    assert mask_value(key, "web-tls") == "web-tls"
