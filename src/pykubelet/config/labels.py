"""The two naming rules that flags share with the API: label keys and label values.

Each check gives the fault in words, or "" when there is none.
"""

import re

_NAME = re.compile(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", re.ASCII)
_DOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*", re.ASCII)


def label_key_fault(key: str) -> str:
    """Say what keeps a text from being a label or taint key (`example.com/role` or `role`)."""
    prefix, slash, name = key.rpartition("/")
    if slash and (not _DOMAIN.fullmatch(prefix) or len(prefix) > 253):
        return f"{key!r} is not a label key: the part before '/' must be a DNS name such as example.com"
    if not _NAME.fullmatch(name) or len(name) > 63:
        return (
            f"{key!r} is not a label key: the name must be 1 to 63 letters, digits, '-', '_' or '.', "
            "starting and ending with a letter or digit, such as example.com/role"
        )
    return ""


def label_value_fault(value: str) -> str:
    """Say what keeps a text from being a label or taint value."""
    if value and (not _NAME.fullmatch(value) or len(value) > 63):
        return (
            f"{value!r} is not a label value: it must be at most 63 letters, digits, '-', '_' or '.', "
            "starting and ending with a letter or digit"
        )
    return ""
