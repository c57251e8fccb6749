"""Files of YAML or JSON as plain data, with every bad input named in one line.

What comes out is a mapping of JSON's types (text keys, text, numbers, booleans, None, lists,
mappings), at most `MAX_DEPTH` levels deep; everything else is a ConfigError that names the file,
the line where there is one, and what to do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from pykubelet.config.documents_yaml import MAX_DEPTH, depth_of, yaml_documents
from pykubelet.config.errors import ConfigError, Problem

MAX_BYTES = 10 * 1024 * 1024


def read_document(path: Path) -> dict[str, Any]:
    """Read a file that holds one YAML or JSON mapping; raises ConfigError."""
    where = str(path)
    try:
        with path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        _refuse(where, "does not exist: check the path")
    except IsADirectoryError:
        _refuse(where, "is a folder: give the path of a file")
    except PermissionError:
        _refuse(where, "cannot be read, permission denied: make it readable for the agent's user")
    except OSError as err:
        _refuse(where, f"cannot be read, {err.strerror}: check the path")
    except ValueError:
        _refuse(where, "is not a path, it holds a NUL character: check the path")
    if len(data) > MAX_BYTES:
        _refuse(where, f"is larger than {MAX_BYTES // 1024**2} MiB: give a configuration file")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        _refuse_binary(where)
    return read_text_document(text, where)


def read_text_document(text: str, where: str) -> dict[str, Any]:
    """Read a text that holds one YAML or JSON mapping; `where` names it in the ConfigError."""
    if "\0" in text:
        _refuse_binary(where)
    # JSON is read as JSON, because YAML knows neither its surrogate pairs nor its long keys.
    # Whatever is wrong with it, the YAML reader finds too, and tells the line.
    if text.lstrip().startswith("{") and (document := _strict_json(text)) is not None:
        return document
    documents = [document for document in yaml_documents(text, where) if document is not None]
    if not documents:
        _refuse(where, "is empty: write a configuration into it")
    if len(documents) > 1:
        _refuse(where, f"has {len(documents)} documents: keep one of them, without --- lines between")
    if not isinstance(documents[0], dict):
        _refuse(where, "is not a mapping of fields: write lines such as kind: KubeletConfiguration")
    return documents[0]


def _strict_json(text: str) -> dict[str, Any] | None:
    """Read JSON that has nothing wrong with it, or give None."""

    def without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(mapping := dict(pairs)) != len(pairs):
            raise ValueError("repeated key")
        return mapping

    def finite(constant: str) -> NoReturn:
        raise ValueError(f"{constant} is not JSON")

    try:
        document = json.loads(text, object_pairs_hook=without_repeats, parse_constant=finite)
        # Half a surrogate pair could never be written out again.
        json.dumps(document, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) and depth_of(document) <= MAX_DEPTH else None


def _refuse_binary(where: str) -> NoReturn:
    _refuse(where, "is binary, not text: give a YAML or JSON file in UTF-8")


def _refuse(where: str, message: str) -> NoReturn:
    raise ConfigError([Problem(where, message)])
