"""The configuration as a document: for `/configz`, for `config print`, for a file.

Every field is shown, also those that are empty, so that a reader sees what can be set and what is
in force. What is written here reads back as the same configuration.
"""

from __future__ import annotations

from typing import Any

import msgspec
import yaml

from pykubelet.api.duration import Duration
from pykubelet.config.documents_yaml import plain_value
from pykubelet.config.types import KubeletConfiguration


def to_document(config: KubeletConfiguration) -> dict[str, Any]:
    """Give the whole configuration in JSON's types, fields in the order of their definition."""
    document = _plain(config)
    assert isinstance(document, dict)
    return document


def to_yaml(config: KubeletConfiguration) -> str:
    """Give the whole configuration as YAML text."""
    return yaml.dump(to_document(config), Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def _plain(value: Any) -> Any:
    match value:
        case msgspec.Struct():
            return {
                field.encode_name: _plain(getattr(value, field.name))
                for field in msgspec.structs.fields(type(value))
            }
        case Duration():
            return str(value)
        case list():
            return [_plain(item) for item in value]
        case dict():
            return {key: _plain(item) for key, item in value.items()}
    return value


class _Dumper(yaml.CSafeDumper):
    """Quotes the texts that Kubernetes' YAML, unlike Python's, would not read as text (`y`, `1e3`)."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = None if plain_value(text) is text else '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)
