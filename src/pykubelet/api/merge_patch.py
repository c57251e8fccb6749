"""Strategic merge patches between two versions of an object.

A patch contains only differences, so that concurrent changes by other clients to other fields are kept. Maps
are merged; a list is replaced unless the API defines a merge key for it (conditions by `type`): then its
items are merged one by one, deleted ones are listed, and the order is sent along.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

REPLACE = ""
"""Merge key for a list that the API would merge, but that the patch must replace."""
Document = Mapping[str, Any]
MergeKeys = Mapping[str, str]


def merge_patch(old: Document, new: Document, merge_keys: MergeKeys) -> dict[str, Any]:
    """Return the patch from `old` to `new`; empty if they are equal.

    Documents consist of plain JSON values without nulls, which mean removal in a patch. `merge_keys` has the
    paths of merged lists: `{"status.conditions": "type"}`.
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
