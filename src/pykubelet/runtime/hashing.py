"""The hash by which a running container is known to match its spec.

It is the reference's own, bit for bit: a node can be handed over between the two agents without a
single restart. Only what cannot change without a new container counts, the name and the image.
"""

from __future__ import annotations

from pykubelet.api.fnv import fnv1a_32
from pykubelet.api.pod import Container
from pykubelet.runtime.gojson import to_go_json


def container_hash(container: Container) -> str:
    """Give the hash as it is written into annotations: hexadecimal, no leading zeros."""
    document = to_go_json({"image": container.image, "name": container.name})
    # What the reference feeds the hash is a dump of the bytes, not the bytes themselves.
    dump = f"([]uint8)[{' '.join(map(str, document.encode(errors='replace')))}]"
    return f"{fnv1a_32(dump.encode()):x}"
