"""TokenReview and SubjectAccessReview: authentication and authorization by the API server."""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct


class UserInfo(ObjectStruct):
    """The authenticated user."""

    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class TokenReviewSpec(ObjectStruct):
    """The token to authenticate."""

    token: str = ""
    audiences: list[str] = []


class TokenReviewStatus(ObjectStruct):
    """Result of a token review; `error` is the reason why the token could not be checked."""

    authenticated: bool = False
    user: UserInfo = field(default_factory=UserInfo)
    audiences: list[str] = []
    error: str = ""


class TokenReview(ObjectStruct):
    """Authentication of a bearer token."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: TokenReviewSpec = field(default_factory=TokenReviewSpec)
    status: TokenReviewStatus = field(default_factory=TokenReviewStatus)


class ResourceAttributes(ObjectStruct):
    """Verb and resource of a request."""

    namespace: str = ""
    verb: str = ""
    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    name: str = ""


class SubjectAccessReviewSpec(ObjectStruct):
    """User and attributes of the request to authorize."""

    resource_attributes: ResourceAttributes | None = None
    user: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}
    uid: str = ""


class SubjectAccessReviewStatus(ObjectStruct):
    """Result of an access review; neither allowed nor denied means that no authorizer allows it."""

    allowed: bool = False
    denied: bool = False
    reason: str = ""
    evaluation_error: str = ""


class SubjectAccessReview(ObjectStruct):
    """Authorization of a request."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: SubjectAccessReviewSpec = field(default_factory=SubjectAccessReviewSpec)
    status: SubjectAccessReviewStatus = field(default_factory=SubjectAccessReviewStatus)
