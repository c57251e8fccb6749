"""The last valid configuration, for a start with invalid configuration files.

With `--watch-config` or `--use-last-good-config` the kubelet stores the merged files, without flags, in
`last-good-config.yaml` of its root directory: when it has started, and after each successful reload. A start
whose files are invalid then uses the stored ones, with the flags of the command line, and logs a warning.
Without these flags, without a stored configuration, or if the flags themselves are invalid, the start fails
with the problems of the files, as upstream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from pykubelet.config.codec import document_to_yaml
from pykubelet.config.errors import ConfigError
from pykubelet.config.flags.kubelet_flags import KubeletFlags
from pykubelet.config.flags.parser import parse_flags
from pykubelet.config.load import LoadedConfig, load
from pykubelet.util.files import write_if_changed

FILE_NAME = "last-good-config.yaml"
_HEAD = "# The last valid configuration, written by the kubelet and used only if its files are invalid.\n"
_OPT_IN = ("watch-config", "use-last-good-config")


def save_last_good(loaded: LoadedConfig) -> None:
    """Store the files of a valid configuration, if a flag requires it. Blocks; raises OSError."""
    if loaded.files is None:
        return
    root = Path(loaded.flags.root_dir)
    # Only root may read it: headers of the static pod URL may contain credentials.
    write_if_changed(root / FILE_NAME, (_HEAD + document_to_yaml(loaded.files)).encode(), 0o600)


def load_or_last_good(argv: Sequence[str]) -> LoadedConfig:
    """Load a command line, with the last valid configuration if its files are invalid and a flag allows that.

    Raises ConfigError with the problems of the files.
    """
    try:
        return load(argv)
    except ConfigError as err:
        parsed = parse_flags(argv)
        if parsed.problems or not any(parsed.values.get(name) for name in _OPT_IN):
            raise
        path = Path(parsed.values.get("root-dir", KubeletFlags().root_dir)) / FILE_NAME
        try:
            stored = datetime.fromtimestamp(path.stat().st_mtime, UTC)
            loaded = load(argv, last_good=path)
        except (ConfigError, OSError):
            raise err from None
        problems = "; ".join(map(str, err.problems))
        reason = (
            f"the configuration files are invalid, using the last valid configuration "
            f"({path} of {stored:%Y-%m-%dT%H:%M:%SZ}): {problems}"
        )
        return replace(loaded, warnings=[reason, *loaded.warnings], files=None, fallback=reason)
