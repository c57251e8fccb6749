"""Exceptions of API server access, and the API's Status object.

KubeError
├─ KubeconfigError     unusable kubeconfig: one line with cause and remedy
├─ Unreachable         no request was sent, or no response received; a later retry may succeed
│  ├─ TimedOut         no response before the deadline
│  ├─ TlsError         the TLS handshake failed: `.why` names the side that rejected the other
│  ├─ Superseded       a stream was closed because the client certificates changed
│  └─ NoCredentials    a token or certificate could not be obtained (file, exec plugin)
├─ InvalidResponse     not a response of an API server: truncated, too long, not JSON
└─ ApiError            error status of the API server: `.code`, `.reason`, `.message`, `.retry_after`
   ├─ BadRequest 400   Unauthorized 401   Forbidden 403   NotFound 404
   ├─ AlreadyExists 409   Conflict 409   Gone 410   Invalid 422
   └─ TooManyRequests 429   ServerError 5xx
"""

from __future__ import annotations

import re

import msgspec

from pykubelet.api.meta import wire_name


class KubeError(Exception):
    """Base class of all failures of API server access."""


class KubeconfigError(KubeError):
    """The kubeconfig is not usable."""


class Unreachable(KubeError):
    """The request could not be sent or received no response."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(server, why)
        self.server = server
        self.why = why

    def __str__(self) -> str:
        return f"the API server {self.server} cannot be reached: {self.why}"


class TimedOut(Unreachable):
    """No response was received before the deadline."""


class TlsError(Unreachable):
    """The TLS connection could not be established."""


class Superseded(Unreachable):
    """A stream was closed because the client certificates changed; the next stream uses the new ones."""

    def __init__(self, server: str) -> None:
        super().__init__(server, "connections are made anew with other certificates")


class NoCredentials(Unreachable):
    """The credentials that the kubeconfig refers to could not be obtained."""

    def __str__(self) -> str:
        return f"no credentials for the API server {self.server}: {self.why}"


class InvalidResponse(KubeError):
    """The response is not one that an API server sends."""


class StatusCause(msgspec.Struct, rename=wire_name):
    """One cause in StatusDetails."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, rename=wire_name):
    """Details of a Status."""

    name: str = ""
    group: str = ""
    kind: str = ""
    uid: str = ""
    causes: list[StatusCause] | None = None
    retry_after_seconds: int = 0

    def has_cause(self, reason: str) -> bool:
        """Return whether one of the causes has this reason."""
        return any(cause.reason == reason for cause in self.causes or ())


class Status(msgspec.Struct, rename=wire_name):
    """Status object in the body of an error response."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None


class ApiError(KubeError):
    """The API server responded with an error status."""

    def __init__(
        self,
        code: int,
        reason: str = "",
        message: str = "",
        *,
        request: str = "",
        retry_after: float | None = None,
        details: StatusDetails | None = None,
        hint: str = "",
    ) -> None:
        super().__init__(code, reason, message)
        self.code = code
        self.reason = reason
        self.message = message
        self.request = request
        self.retry_after = retry_after
        """Seconds of Retry-After; None if the server sent none."""
        self.details = details or StatusDetails()
        self.hint = hint
        """Remedy for the operator."""

    def __str__(self) -> str:
        cause = self.message or self.reason or "no reason was given"
        text = (
            f"{self.code} {self.reason}: {cause}" if self.reason and self.message else f"{self.code}: {cause}"
        )
        text = f"{self.request}: {text}" if self.request else text
        return f"{text} ({self.hint})" if self.hint else text


class BadRequest(ApiError):
    """The request is malformed or not supported by this API server."""


class Unauthorized(ApiError):
    """The credentials are not accepted."""


class Forbidden(ApiError):
    """The authenticated user lacks the permission; `hint` names the RBAC rule that would grant it."""

    @property
    def lacks_relationship(self) -> bool:
        """Whether the node authorizer knows no pod of this node that refers to the object, or not yet."""
        return _NO_RELATIONSHIP in self.message


class NotFound(ApiError):
    """The object or its resource type does not exist."""


class AlreadyExists(ApiError):
    """An object of this name exists."""


class Conflict(ApiError):
    """The object was changed concurrently, or a precondition failed."""


class Gone(ApiError):
    """The requested resource version is too old: relist."""


class Invalid(ApiError):
    """The object failed validation; the message names the fields."""


class TooManyRequests(ApiError):
    """The API server throttles requests, of all clients or of this one."""


class ServerError(ApiError):
    """The API server failed internally."""


_CLASSES: dict[int, type[ApiError]] = {
    400: BadRequest,
    401: Unauthorized,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    410: Gone,
    422: Invalid,
    429: TooManyRequests,
}


def api_error(
    code: int, body: bytes, *, request: str = "", retry_after: float | None = None, hint: str = ""
) -> ApiError:
    """Return the error for an error response; a body that is not a Status is quoted, up to 200 bytes."""
    status = read_status(body)
    if status is None:
        text = " ".join(body[:200].decode(errors="replace").split())
        status = Status(message=text, code=code)
    return status_error(status, code, request=request, retry_after=retry_after, hint=hint)


def status_error(
    status: Status,
    code: int = 0,
    *,
    request: str = "",
    retry_after: float | None = None,
    hint: str = "",
) -> ApiError:
    """Return the error for a Status, as in a watch event; `code` is the HTTP status code, if there is one."""
    code = code or status.code or 500
    kind = ServerError if code >= 500 else _CLASSES.get(code, ApiError)
    if status.reason == "AlreadyExists":
        kind = AlreadyExists
    elif status.reason == "Expired":
        kind = Gone
    if retry_after is None and status.details and status.details.retry_after_seconds > 0:
        retry_after = float(status.details.retry_after_seconds)
    return kind(
        code,
        status.reason,
        status.message,
        request=request,
        retry_after=retry_after,
        details=status.details,
        hint=hint,
    )


def read_status(body: bytes) -> Status | None:
    """Decode a Status; return None for anything else."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return status if status.kind == "Status" else None


_USER = 'User "'
_CANNOT = re.compile(r'" cannot \S+ (resource|path)\b')
"""Text after the user name in a denial, the same for all authorizers."""
_NO_RELATIONSHIP = "no relationship found between node"
_ANOTHER_NODES = (
    "same name as the requesting node",
    "only its own Node object",
    "is not allowed to modify node",
    "with spec.nodeName field selector",
    "with spec.nodeName set to itself",
)
"""Texts of denials of requests that concern another node."""


def _is_denial(message: str) -> bool:
    """Return whether a line of the message denies the user a permission. Takes linear time."""
    return any(
        _CANNOT.search(line, start + len(_USER)) is not None
        for line in message.split("\n")
        if (start := line.find(_USER)) >= 0
    )


def forbidden_hint(message: str, verb: str, group: str, resource: str, namespace: str = "") -> str:
    """Return the remedy for a forbidden request, for RBAC or for the node authorizer.

    `resource` includes the subresource (`pods/status`); an empty namespace means cluster scope. The result is
    empty if the user is authorized but the object is rejected (quota, pod security): no RBAC rule helps, and
    the message contains the reason.
    """
    if _NO_RELATIONSHIP in message:
        return "a node may only use objects that pods bound to it refer to"
    if any(text in message for text in _ANOTHER_NODES):
        return (
            "the kubeconfig is another node's: give this node one of its own, or the name in its "
            "certificate by --hostname-override"
        )
    if message and not _is_denial(message):
        return ""
    where = f"a Role in namespace {namespace} or a ClusterRole" if namespace else "a ClusterRole"
    return (
        f"the permission to {verb} {resource} is missing: bind {where} with the rule "
        f'{{apiGroups: ["{group}"], resources: ["{resource}"], verbs: ["{verb}"]}} to this user'
    )
