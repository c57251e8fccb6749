"""Strategic merge patches: what to send so that an object becomes another one.

Only differences are in a patch, so that what others wrote meanwhile stays. Maps are merged; a list is
replaced as a whole unless the API gives it a merge key (conditions by `type`): then its items are
merged one by one, those that are gone are named, and the order is sent along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLACE = ""
"""As a merge key: the API merges this list, but nobody should; the patch says to replace it."""
Document = Mapping[str, Any]
MergeKeys = Mapping[str, str]


def merge_patch(old: Document, new: Document, merge_keys: MergeKeys) -> dict[str, Any]:
    """Give the patch that makes `new` of `old`; empty when they do not differ.

    Documents are of plain JSON values without nulls, which in a patch mean removal. `merge_keys` has
    the paths of merged lists: `{"status.conditions": "type"}`.
    """
    return _of_map(old, new, merge_keys, "")


def _of_map(old: Document, new: Document, merge_keys: MergeKeys, path: str) -> dict[str, Any]:
    patch: dict[str, Any] = {}
    for name, value in new.items():
        before, place = old.get(name), f"{path}{name}"
        if name not in old:
            patch[name] = value
        elif value == before:
            continue
        elif isinstance(value, Mapping) and isinstance(before, Mapping):
            patch[name] = _of_map(before, value, merge_keys, f"{place}.")
        elif place in merge_keys and isinstance(value, list) and isinstance(before, list):
            patch |= _of_list(name, before, value, merge_keys[place])
        else:
            patch[name] = value
    return patch | dict.fromkeys(name for name in old if name not in new)


def _of_list(name: str, old: Sequence[Document], new: Sequence[Document], key: str) -> dict[str, Any]:
    before = {item.get(key): item for item in old}
    after = {item.get(key): item for item in new}
    if key == REPLACE or None in before or None in after or len(before) < len(old) or len(after) < len(new):
        return {name: [*new, {"$patch": "replace"}]}
    items: list[dict[str, Any]] = []
    for identity, item in after.items():
        if identity not in before:
            items.append(dict(item))
        elif changes := _of_map(before[identity], item, {}, ""):
            items.append({key: identity, **changes})
    items += [{"$patch": "delete", key: identity} for identity in before if identity not in after]
    patch: dict[str, Any] = {f"$setElementOrder/{name}": [{key: identity} for identity in after]}
    return patch | {name: items} if items else patch
