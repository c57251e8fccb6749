"""Who asks: users, and what a request shows to prove that it is from one.

Pure: what stands in a certificate or a header, without the judgement whether it is true.

What a request wants, in the words of RBAC: a verb on `nodes/<subresource>` of this node.

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

A request that is not answered as the client wished: what to say instead.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

ANONYMOUS = "system:anonymous"
AUTHENTICATED = "system:authenticated"
UNAUTHENTICATED = "system:unauthenticated"
_CREDENTIAL_ID = "authentication.kubernetes.io/credential-id"
_UID_IN_SUBJECT = "1.3.6.1.4.1.57683.2"
_BEARER_PROTOCOL = "base64url.bearer.authorization.k8s.io."


class BadCredentials(Exception):
    """What was shown proves nothing; the text is for the log, never for the client."""


@dataclass(frozen=True, slots=True)
class User:
    """Somebody, as the API server's reviews know people."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def with_group(self, group: str) -> User:
        """The same, as a member of one group more."""
        return User(self.name, self.uid, (*self.groups, group), self.extra)


NOBODY = User(ANONYMOUS, groups=(UNAUTHENTICATED,))
"""Who shows nothing, where that is allowed."""


@dataclass(frozen=True, slots=True)
class RequestCredentials:
    """What a request shows of its sender."""

    chain: tuple[bytes, ...] = ()
    """Certificates in DER, the sender's own first."""
    subject: Sequence[Sequence[tuple[str, str]]] = ()
    """The subject of the first, as Python's `getpeercert` tells it."""
    authorization: str = ""
    protocols: Sequence[str] | None = None
    """The values of Sec-WebSocket-Protocol; None when this is no WebSocket request."""


def certificate_user(subject: Sequence[Sequence[tuple[str, str]]], fingerprint: str) -> User | None:
    """The user that a certificate names; None when it names nobody. Raises BadCredentials.

    `fingerprint` is the SHA-256 of the certificate in hexadecimal digits.
    """
    entries = [entry for part in subject for entry in part]
    names = [value for kind, value in entries if kind == "commonName"]
    if not names or not names[-1]:
        return None
    uids = [value for kind, value in entries if kind == _UID_IN_SUBJECT]
    if len(uids) > 1 or uids == [""]:
        raise BadCredentials(f"the certificate of {names[-1]} has more than one uid, or an empty one")
    groups = tuple(value for kind, value in entries if kind == "organizationName")
    return User(names[-1], "".join(uids), groups, {_CREDENTIAL_ID: [f"X509SHA256={fingerprint}"]})


def bearer_token(authorization: str) -> str:
    """The token in an Authorization header; empty when there is none."""
    scheme, _, rest = authorization.strip().partition(" ")
    return rest.split(" ")[0] if scheme.lower() == "bearer" else ""


def websocket_token(headers: Iterable[str]) -> str:
    """The token that a browser hides among its WebSocket protocols; empty when there is none.

    Raises BadCredentials for one that cannot be read, for several, and when no other protocol is left
    that the answer could name.
    """
    protocols = split_protocols(headers)
    tokens = [name.removeprefix(_BEARER_PROTOCOL) for name in protocols if name.startswith(_BEARER_PROTOCOL)]
    if len(tokens) > 1:
        raise BadCredentials("there are several tokens among the WebSocket protocols")
    if not tokens:
        return ""
    try:
        padded = tokens[0] + "=" * (-len(tokens[0]) % 4)
        token = base64.b64decode(padded.encode("ascii"), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeError):
        raise BadCredentials("the token among the WebSocket protocols cannot be read") from None
    if token and len(tokens) == len(protocols):
        raise BadCredentials("a token among the WebSocket protocols needs another protocol beside it")
    return token


def split_protocols(headers: Iterable[str]) -> list[str]:
    """The protocols of one or several Sec-WebSocket-Protocol headers, in their order."""
    return [name for header in headers for part in header.split(",") if (name := part.strip())]


def without_tokens(protocols: Iterable[str]) -> list[str]:
    """The protocols that may be handed on: no token among them."""
    return [name for name in protocols if not name.startswith(_BEARER_PROTOCOL)]


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
class AuthorizerAttributes:
    """One permission on this node; the verb is empty for methods that no permission covers."""

    verb: str
    subresource: str


def wishes(method: str, path: str) -> list[AuthorizerAttributes]:
    """The permissions any one of which allows a request; `path` is decoded, without the query."""
    verb = _VERBS.get(method, "")
    fine = _subresource(_FINE, path)
    only = _subresource(_ONLY, path)
    return [AuthorizerAttributes(verb, name) for name in (fine, only or "proxy") if name]


def _subresource(table: tuple[tuple[str, str], ...], path: str) -> str:
    return next((name for root, name in table if path == root or path.startswith(f"{root}/")), "")


class HttpError(Exception):
    """Ends a request with a status, and with a text that the client may see."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})
