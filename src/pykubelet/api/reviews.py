"""TokenReview: asking the API server whose a bearer token is.

SubjectAccessReview: asking the API server whether somebody may do something.
"""

from __future__ import annotations

from msgspec import field

from pykubelet.api.meta import ObjectMeta, ObjectStruct


class UserInfo(ObjectStruct):
    """Who somebody is, as the API server says."""

    username: str = ""
    uid: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}


class TokenReviewSpec(ObjectStruct):
    """The token in question."""

    token: str = ""
    audiences: list[str] = []


class TokenReviewStatus(ObjectStruct):
    """The answer; `error` is why the token could not be checked."""

    authenticated: bool = False
    user: UserInfo = field(default_factory=UserInfo)
    audiences: list[str] = []
    error: str = ""


class TokenReview(ObjectStruct):
    """A question about a token, and its answer."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: TokenReviewSpec = field(default_factory=TokenReviewSpec)
    status: TokenReviewStatus = field(default_factory=TokenReviewStatus)


class ResourceAttributes(ObjectStruct):
    """What somebody wants to do, to which resource."""

    namespace: str = ""
    verb: str = ""
    group: str = ""
    version: str = ""
    resource: str = ""
    subresource: str = ""
    name: str = ""


class SubjectAccessReviewSpec(ObjectStruct):
    """Who wants to do what."""

    resource_attributes: ResourceAttributes | None = None
    user: str = ""
    groups: list[str] = []
    extra: dict[str, list[str]] = {}
    uid: str = ""


class SubjectAccessReviewStatus(ObjectStruct):
    """The answer; neither allowed nor denied means that nobody allows it."""

    allowed: bool = False
    denied: bool = False
    reason: str = ""
    evaluation_error: str = ""


class SubjectAccessReview(ObjectStruct):
    """A question about a permission, and its answer."""

    metadata: ObjectMeta = field(default_factory=ObjectMeta)
    spec: SubjectAccessReviewSpec = field(default_factory=SubjectAccessReviewSpec)
    status: SubjectAccessReviewStatus = field(default_factory=SubjectAccessReviewStatus)
