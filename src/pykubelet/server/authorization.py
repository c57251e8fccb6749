"""Whether a user may do what a request asks for.

Any one of the request's wishes that is allowed is enough; they are asked for in their order. When the
API server cannot tell, the answer is an error, never yes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from pykubelet.logs import get_logger
from pykubelet.server.attributes import Wish
from pykubelet.server.identity import User
from pykubelet.server.refused import Refused
from pykubelet.server.reviews import NoAnswer

log = get_logger(__name__)


class Judge(Protocol):
    """Decides over one wish (`reviews.AccessReviews` is one)."""

    async def allowed(self, user: User, wish: Wish) -> bool:
        """Whether the user may; raises NoAnswer when that cannot be found out."""
        ...


class AlwaysAllow:
    """Everybody may do everything."""

    async def allowed(self, user: User, wish: Wish) -> bool:
        """Yes."""
        return True


async def authorize(judge: Judge, user: User, wanted: Iterable[Wish]) -> None:
    """Return when the user may have one of the wishes fulfilled; raises Refused otherwise."""
    asked: list[Wish] = []
    for wish in wanted:
        asked.append(wish)
        try:
            if await judge.allowed(user, wish):
                return
        except NoAnswer as err:
            log.v(2).info("Authorization error", user=user.name, subresource=wish.subresource, err=err)
            raise Refused(
                500,
                f"Authorization error (user={user.name}, verb={wish.verb}, resource=nodes, "
                f"subresource={wish.subresource})",
            ) from None
    names = " ".join(wish.subresource for wish in asked)
    verb = asked[0].verb
    log.v(2).info("Forbidden", user=user.name, verb=verb, resource="nodes", subresources=names)
    raise Refused(
        403, f"Forbidden (user={user.name}, verb={verb}, resource=nodes, subresource(s)=[{names}])\n"
    )
