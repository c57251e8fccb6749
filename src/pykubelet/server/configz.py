"""`/configz`: the configuration in force, as one document that tools can read.

The document is made once, when the agent starts, from the configuration that passed validation;
header values (they carry credentials) are masked.
"""

from __future__ import annotations

from typing import Any

from pykubelet.config.encode import to_document
from pykubelet.config.types import KubeletConfiguration
from pykubelet.logs.mask import MASK


def configz_document(config: KubeletConfiguration) -> dict[str, Any]:
    """Give what `/configz` answers."""
    document = to_document(config)
    headers = document.get("staticPodURLHeader") or {}
    document["staticPodURLHeader"] = {name: [MASK for _ in values] for name, values in headers.items()}
    return {"kubeletconfig": document}
