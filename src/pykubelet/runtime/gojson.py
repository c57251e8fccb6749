"""JSON as Go writes it, byte for byte.

Values that other agents compare or hash (annotations, the container hash) must not differ in a
space or an escape.
"""

from __future__ import annotations

import json
from typing import Any

# Go keeps JSON safe to paste into HTML and JavaScript.
_ESCAPED = str.maketrans({char: f"\\u{ord(char):04x}" for char in "<>&\u2028\u2029"})


def to_go_json(value: Any) -> str:
    """Write a JSON-ready value; the keys keep their order."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).translate(_ESCAPED)
