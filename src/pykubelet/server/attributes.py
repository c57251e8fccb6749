"""What a request wants, in the words of RBAC: a verb on `nodes/<subresource>` of this node.

Each path asks for one permission, and where a finer one exists, for that first: whoever may `get
nodes/pods` needs no `nodes/proxy`, which also allows to run commands in every container.

| path | subresources, the first that is allowed counts |
|---|---|
| `/stats/…` | stats |
| `/metrics/…` | metrics |
| `/logs/…` | log |
| `/checkpoint/…` | checkpoint |
| `/statusz` | statusz |
| `/flagz` | configz |
| `/pods`, `/runningpods/` | pods, proxy |
| `/healthz/…` | healthz, proxy |
| `/configz` | configz, proxy |
| any other | proxy |
"""

from __future__ import annotations

from dataclasses import dataclass

_VERBS = {"POST": "create", "GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_FINE = (("/pods", "pods"), ("/healthz", "healthz"), ("/configz", "configz"), ("/runningpods", "pods"))
_ONLY = (
    ("/stats", "stats"),
    ("/metrics", "metrics"),
    ("/logs", "log"),
    ("/checkpoint", "checkpoint"),
    ("/statusz", "statusz"),
    ("/flagz", "configz"),
)


@dataclass(frozen=True, slots=True)
class Wish:
    """One permission on this node; the verb is empty for methods that no permission covers."""

    verb: str
    subresource: str


def wishes(method: str, path: str) -> list[Wish]:
    """The permissions any one of which allows a request; `path` is decoded, without the query."""
    verb = _VERBS.get(method, "")
    fine = _subresource(_FINE, path)
    only = _subresource(_ONLY, path)
    return [Wish(verb, name) for name in (fine, only or "proxy") if name]


def _subresource(table: tuple[tuple[str, str], ...], path: str) -> str:
    return next((name for root, name in table if path == root or path.startswith(f"{root}/")), "")
