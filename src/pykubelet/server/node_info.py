"""Paths and settings of a node that the command line needs: a document of the control socket and a file.

The kubelet serves the document as `GET /node` on its control socket, and writes it into its root directory
at each start, so that commands work while the kubelet is stopped. It contains no secret. The file stays
after the kubelet has ended; a reader decides by the control socket whether a kubelet runs.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from pykubelet.api.meta import from_json, to_json
from pykubelet.util.files import write_if_changed

INFO_FILE_NAME = "pykubelet-node.json"
"""File name of the document in the kubelet's root directory."""
_MAX_BYTES = 1 << 20


class NodeInfo(msgspec.Struct, kw_only=True, rename="camel"):
    """Where a kubelet keeps what commands work with; an empty path or name is not configured."""

    node_name: str
    root_dir: str
    cert_dir: str
    static_pod_path: str = ""
    pod_logs_dir: str
    container_runtime_endpoint: str
    image_service_endpoint: str = ""
    config_file: str = ""
    config_dir: str = ""
    kubeconfig: str = ""
    bootstrap_kubeconfig: str = ""
    client_ca_file: str = ""
    tls_cert_file: str = ""
    log_file: str = ""
    """File of `--log-file` or `--log-dir`."""
    standalone: bool = False
    """Whether the kubelet has no API server."""
    served: list[str] | None = None
    """Kinds of API objects that manifests may refer to; None in a document of an older version."""
    version: str = ""
    pid: int = 0
    """Process that wrote the document; it may have ended."""


def write_node_info(root_dir: Path, info: NodeInfo) -> None:
    """Write the file atomically. Raises OSError."""
    text = msgspec.json.format(to_json(info), indent=2) + b"\n"
    write_if_changed(root_dir / INFO_FILE_NAME, text, 0o600)


def read_node_info(root_dir: Path) -> NodeInfo | None:
    """Return what the last kubelet wrote, or None without a readable file. Raises PermissionError."""
    try:
        with (root_dir / INFO_FILE_NAME).open("rb") as file:
            return from_json(NodeInfo, file.read(_MAX_BYTES))
    except PermissionError:
        raise
    except (OSError, ValueError):
        return None
