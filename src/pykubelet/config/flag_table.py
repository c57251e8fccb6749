"""All flags in one table: those of v1.25 that nodes in the field still pass, and those of v1.36.

The rows are in the `flags_*` modules by theme, in the order in which the help shows them. What a flag
sets and what its default is follow from its row; nothing about a flag is written anywhere else.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from pykubelet.api.casing import wire_name
from pykubelet.config import flags_logs, flags_node, flags_pods, flags_resources
from pykubelet.config.flag_rows import Flag
from pykubelet.config.kubelet_flags import KubeletFlags
from pykubelet.config.types import KubeletConfiguration

FLAGS: tuple[Flag, ...] = (*flags_node.ROWS, *flags_pods.ROWS, *flags_resources.ROWS, *flags_logs.ROWS)

BY_NAME: Mapping[str, Flag] = MappingProxyType({flag.name: flag for flag in FLAGS})


def get_field(config: KubeletConfiguration, path: str) -> Any:
    """Read a field by its path of Python names."""
    value: Any = config
    for name in path.split("."):
        value = getattr(value, name)
    return value


def set_field(config: KubeletConfiguration, path: str, value: Any) -> None:
    """Write a field by its path of Python names."""
    *parents, last = path.split(".")
    target: Any = get_field(config, ".".join(parents)) if parents else config
    setattr(target, last, value)


def field_path(path: str) -> str:
    """Give the path as the configuration file writes it: `authentication.x509.clientCAFile`."""
    return ".".join(map(wire_name, path.split(".")))


def default_text(flag: Flag, config: KubeletConfiguration) -> str:
    """Return a flag's default as the help shows it, "" for a zero value; `config` has no flags applied."""
    if not (flag.field or flag.attribute):
        return flag.default
    value = _default(flag, config)
    # Zero values are not worth showing; those of quantities are texts.
    return flag.kind.show(value) if value not in ("", "0") and value and flag.attribute != "version" else ""


def flag_default(flag: Flag, config: KubeletConfiguration) -> str:
    """Return a flag's default as text, zero values included; `config` has no flags applied."""
    if not (flag.field or flag.attribute):
        return flag.default or (flag.kind.show(False) if flag.kind.name == "bool" else "")
    return flag.kind.show(_default(flag, config))


def _default(flag: Flag, config: KubeletConfiguration) -> Any:
    return get_field(config, flag.field) if flag.field else getattr(KubeletFlags(), flag.attribute)
