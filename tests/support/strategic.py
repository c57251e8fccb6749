"""How an API server joins a strategic merge patch with a pod's status: the rules that matter here."""

import copy
from typing import Any

MERGE_KEYS = {"conditions": "type", "drivers": "name", "hostIPs": "ip", "podIPs": "ip"}
ORDER = "$setElementOrder/"


def apply_patch(document: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the patch applied; both stay as they are."""
    result = copy.deepcopy(document)
    for key, value in patch.items():
        if key.startswith("$"):
            continue
        if value is None:
            result.pop(key, None)
        elif isinstance(value, dict):
            before = result.get(key)
            result[key] = apply_patch(before if isinstance(before, dict) else {}, value)
        elif isinstance(value, list) and key in MERGE_KEYS:
            result[key] = _merged(result.get(key, []), value, MERGE_KEYS[key], patch.get(ORDER + key))
        else:
            result[key] = copy.deepcopy(value)
    return result


def _merged(before: list[Any], patch: list[Any], key: str, order: list[Any] | None) -> list[Any]:
    found = {item[key]: item for item in before}
    for item in patch:
        if item.get("$patch") == "replace":
            found = {}
        elif item.get("$patch") == "delete":
            found.pop(item[key], None)
        else:
            found[item[key]] = apply_patch(found.get(item[key], {}), item)
    if order is None:
        return list(found.values())
    ranks = [item[key] for item in order]
    return sorted(found.values(), key=lambda item: ranks.index(item[key]) if item[key] in ranks else -1)
