"""Users, request credentials, authorization attributes, and the error that ends a request.

Pure: credentials are parsed from certificates and headers here and verified by `auth.py`.

A request needs an RBAC verb on `nodes/<subresource>` of this node. Where a fine-grained subresource exists,
it is checked before `proxy`: a client with `get nodes/pods` does not need `nodes/proxy`, which also allows
running commands in every container.

| path | subresources, any of which suffices, in the order of the checks |
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

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from aiohttp import web

ANONYMOUS = "system:anonymous"
AUTHENTICATED = "system:authenticated"
UNAUTHENTICATED = "system:unauthenticated"
_CREDENTIAL_ID = "authentication.kubernetes.io/credential-id"
_UID_IN_SUBJECT = "1.3.6.1.4.1.57683.2"
_BEARER_PROTOCOL = "base64url.bearer.authorization.k8s.io."


class BadCredentials(Exception):
    """Raised for invalid credentials; the message is for the log, never for the client."""


@dataclass(frozen=True, slots=True)
class User:
    """User information, as in TokenReview and SubjectAccessReview."""

    name: str
    uid: str = ""
    groups: tuple[str, ...] = ()
    extra: Mapping[str, Sequence[str]] = field(default_factory=dict)

    def with_group(self, group: str) -> User:
        """Return the user with one more group."""
        return User(self.name, self.uid, (*self.groups, group), self.extra)


ANONYMOUS_USER = User(ANONYMOUS, groups=(UNAUTHENTICATED,))
"""User of requests without credentials, where anonymous requests are allowed."""


@dataclass(frozen=True, slots=True)
class RequestCredentials:
    """Credentials of a request, not verified."""

    chain: tuple[bytes, ...] = ()
    """Client certificate chain in DER, leaf first."""
    subject: Sequence[Sequence[tuple[str, str]]] = ()
    """Subject of the leaf certificate, as returned by Python's `getpeercert`."""
    authorization: str = ""
    protocols: Sequence[str] | None = None
    """Values of the Sec-WebSocket-Protocol headers; None if not a WebSocket request."""


def certificate_user(
    subject: Sequence[Sequence[tuple[str, str]]], fingerprint: str, *, reads_uid: bool = True
) -> User | None:
    """Return the user of a certificate; None without a common name. Raises BadCredentials.

    `fingerprint` is the SHA-256 digest of the certificate in hexadecimal.
    """
    entries = [entry for part in subject for entry in part]
    names = [value for kind, value in entries if kind == "commonName"]
    if not names or not names[-1]:
        return None
    uids = [value for kind, value in entries if kind == _UID_IN_SUBJECT and reads_uid]
    if len(uids) > 1 or uids == [""]:
        raise BadCredentials(f"the certificate of {names[-1]} has more than one uid, or an empty one")
    groups = tuple(value for kind, value in entries if kind == "organizationName")
    return User(names[-1], "".join(uids), groups, {_CREDENTIAL_ID: [f"X509SHA256={fingerprint}"]})


def bearer_token(authorization: str) -> str:
    """Return the bearer token in an Authorization header; empty if none."""
    scheme, _, rest = authorization.strip().partition(" ")
    return rest.split(" ")[0] if scheme.lower() == "bearer" else ""


def websocket_token(headers: Iterable[str]) -> str:
    """Return the bearer token that a browser sends as a WebSocket protocol; empty if none.

    Raises BadCredentials for an invalid token, for several tokens, and if no other protocol remains that the
    response could select.
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
    """Return the protocols of the Sec-WebSocket-Protocol headers, in order."""
    return [name for header in headers for part in header.split(",") if (name := part.strip())]


def without_tokens(protocols: Iterable[str]) -> list[str]:
    """Return the protocols without bearer tokens, which must not be forwarded."""
    return [name for name in protocols if not name.startswith(_BEARER_PROTOCOL)]


_VERBS = {"POST": "create", "GET": "get", "PUT": "update", "PATCH": "patch", "DELETE": "delete"}
_FINE_GRAINED = (
    ("/pods", "pods"),
    ("/healthz", "healthz"),
    ("/configz", "configz"),
    ("/runningpods", "pods"),
)
_WITHOUT_PROXY = (
    ("/stats", "stats"),
    ("/metrics", "metrics"),
    ("/logs", "log"),
    ("/checkpoint", "checkpoint"),
    ("/statusz", "statusz"),
    ("/flagz", "configz"),
)


@dataclass(frozen=True, slots=True)
class AuthorizerAttributes:
    """Authorization attributes on this node; `verb` is empty for HTTP methods without an RBAC verb."""

    verb: str
    subresource: str


def required_attributes(method: str, path: str) -> list[AuthorizerAttributes]:
    """Return the attributes, any of which allows the request; `path` is decoded, without the query."""
    verb = _VERBS.get(method, "")
    fine_grained = _subresource(_FINE_GRAINED, path)
    without_proxy = _subresource(_WITHOUT_PROXY, path)
    return [AuthorizerAttributes(verb, name) for name in (fine_grained, without_proxy or "proxy") if name]


def _subresource(table: tuple[tuple[str, str], ...], path: str) -> str:
    return next((name for root, name in table if path == root or path.startswith(f"{root}/")), "")


class HttpError(Exception):
    """Raised to end a request with an HTTP status and a text that is sent to the client."""

    def __init__(self, status: int, text: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(status, text)
        self.status = status
        self.text = text
        self.headers = dict(headers or {})


USER: web.RequestKey[User] = web.RequestKey("user", User)
"""Key of the authenticated and authorized user in a request."""


def user_name(request: web.BaseRequest) -> str:
    """Return the user's name; empty on servers without authentication."""
    user = request.get(USER)
    return user.name if user is not None else ""
