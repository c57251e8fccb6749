"""TokenReview: asking the API server whose a bearer token is."""

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
