"""Kubeconfig files that flags name, read with the parser of configuration files."""

from __future__ import annotations

from pathlib import Path

from pykubelet.apiserver import rest_config as kubeconfig
from pykubelet.apiserver.errors import KubeconfigError
from pykubelet.apiserver.rest_config import RestConfig
from pykubelet.config.documents import read_document
from pykubelet.config.errors import ConfigError


def load_kubeconfig(path: Path) -> RestConfig:
    """Return the current context of a kubeconfig file. Raises KubeconfigError for any invalid file."""
    try:
        return kubeconfig.load(path.absolute(), read_document)
    except ConfigError as err:
        raise KubeconfigError(str(err)) from None
