"""What can go wrong between the agent and the API server, as a small tree.

KubeError
├─ KubeconfigError     the kubeconfig cannot be used: one line with cause and remedy
├─ Unreachable         nobody was asked, or nobody answered; trying again later may help
│  ├─ TimedOut         no answer in time
│  ├─ TlsError         the two sides do not trust each other: `.why` says who whom
│  └─ NoCredentials    a token or certificate could not be had (file, plugin)
├─ BadAnswer           an answer that no API server gives: cut off, too long, not JSON
└─ ApiError            the API server said no: `.code`, `.reason`, `.message`, `.retry_after`
   ├─ BadRequest 400   Unauthorized 401   Forbidden 403   NotFound 404
   ├─ AlreadyExists 409   Conflict 409   Gone 410   Invalid 422
   └─ TooManyRequests 429   ServerError 5xx
"""

from __future__ import annotations

import re

import msgspec

from pykubelet.api.meta import wire_name


class KubeError(Exception):
    """Something between the agent and the API server failed."""


class KubeconfigError(KubeError):
    """A kubeconfig that cannot be used."""


class Unreachable(KubeError):
    """The API server could not be asked or did not answer."""

    def __init__(self, server: str, why: str) -> None:
        super().__init__(server, why)
        self.server = server
        self.why = why

    def __str__(self) -> str:
        return f"the API server {self.server} cannot be reached: {self.why}"


class TimedOut(Unreachable):
    """There was no answer in time."""


class TlsError(Unreachable):
    """No trusted connection could be made."""


class Superseded(Unreachable):
    """A stream was ended because the agent's certificates changed; the next one uses the new ones."""

    def __init__(self, server: str) -> None:
        super().__init__(server, "connections are made anew with other certificates")


class NoCredentials(Unreachable):
    """What the kubeconfig names to identify the agent could not be had."""

    def __str__(self) -> str:
        return f"no credentials for the API server {self.server}: {self.why}"


class InvalidResponse(KubeError):
    """An answer that no API server gives."""


class StatusCause(msgspec.Struct, rename=wire_name):
    """One of several causes of a refusal."""

    reason: str = ""
    message: str = ""
    field: str = ""


class StatusDetails(msgspec.Struct, rename=wire_name):
    """What a refusal is about."""

    name: str = ""
    group: str = ""
    kind: str = ""
    uid: str = ""
    causes: list[StatusCause] | None = None
    retry_after_seconds: int = 0

    def has_cause(self, reason: str) -> bool:
        """Whether one of the causes has this reason."""
        return any(cause.reason == reason for cause in self.causes or ())


class Status(msgspec.Struct, rename=wire_name):
    """The API server's own word on a request that failed."""

    kind: str = ""
    message: str = ""
    reason: str = ""
    code: int = 0
    details: StatusDetails | None = None


class ApiError(KubeError):
    """The API server answered, and the answer is no."""

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
        """Seconds after which the server wants to be asked again; None when it did not say."""
        self.details = details or StatusDetails()
        self.hint = hint
        """What a person can do about it."""

    def __str__(self) -> str:
        said = self.message or self.reason or "no reason was given"
        text = (
            f"{self.code} {self.reason}: {said}" if self.reason and self.message else f"{self.code}: {said}"
        )
        text = f"{self.request}: {text}" if self.request else text
        return f"{text} ({self.hint})" if self.hint else text


class BadRequest(ApiError):
    """The request makes no sense to this API server."""


class Unauthorized(ApiError):
    """The API server does not know who asks."""


class Forbidden(ApiError):
    """The API server knows who asks, and refuses; the text says which rule would allow it."""

    @property
    def to_a_stranger(self) -> bool:
        """Whether the node authorizer knows of no pod here that would need it; perhaps not yet."""
        return _STRANGER in self.message


class NotFound(ApiError):
    """The object, or the kind of object, does not exist."""


class AlreadyExists(ApiError):
    """There is an object of this name."""


class Conflict(ApiError):
    """The object has changed meanwhile, or a precondition does not hold."""


class Gone(ApiError):
    """The wanted version is too old to be served: list anew."""


class Invalid(ApiError):
    """The object is not valid; the message says which fields."""


class TooManyRequests(ApiError):
    """The API server has too much to do, for all or for this agent."""


class ServerError(ApiError):
    """The API server itself failed."""


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
    """Make the error for an answer of the API server; what is not a Status is quoted, briefly."""
    status = read_status(body)
    if status is None:
        words = " ".join(body[:200].decode(errors="replace").split())
        status = Status(message=words, code=code)
    return status_error(status, code, request=request, retry_after=retry_after, hint=hint)


def status_error(
    status: Status,
    code: int = 0,
    *,
    request: str = "",
    retry_after: float | None = None,
    hint: str = "",
) -> ApiError:
    """Make the error for a Status, such as a watch may carry; `code` is that of the answer, if any."""
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
    """Read a Status; None for anything else."""
    try:
        status = msgspec.json.decode(body, type=Status)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return status if status.kind == "Status" else None


_USER = 'User "'
_CANNOT = re.compile(r'" cannot \S+ (resource|path)\b')
"""Text of a denial behind the name of the user, whichever authorizer decided."""
_STRANGER = "no relationship found between node"
_ANOTHER_NODES = (
    "same name as the requesting node",
    "only its own Node object",
    "is not allowed to modify node",
    "with spec.nodeName field selector",
    "with spec.nodeName set to itself",
)
"""What API servers say to a node that acts for another one."""


def _is_denial(message: str) -> bool:
    """Return whether a line of the message denies the user a permission. Takes linear time."""
    return any(
        _CANNOT.search(line, start + len(_USER)) is not None
        for line in message.split("\n")
        if (start := line.find(_USER)) >= 0
    )


def forbidden_hint(message: str, verb: str, group: str, resource: str, namespace: str = "") -> str:
    """Say what would allow a request that was forbidden, by RBAC or by the node authorizer.

    `resource` is with its subresource (`pods/status`); without a namespace it is the cluster's. Empty
    when the user may ask, and only what is asked for is refused (a quota, a pod's security): no rule
    would help, and the message says why.
    """
    if _STRANGER in message:
        return "a node may only use objects that pods bound to it refer to"
    if any(words in message for words in _ANOTHER_NODES):
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
