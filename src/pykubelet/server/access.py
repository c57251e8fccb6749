"""Authentication and authorization as the configuration wants them, put together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pykubelet.config.types import KubeletConfiguration
from pykubelet.server.authentication import Authenticator
from pykubelet.server.authorization import AlwaysAllow, Judge
from pykubelet.server.client_certs import BadAuthorities, ClientCertificates
from pykubelet.server.metrics import ServerMetrics
from pykubelet.server.openssl import OpensslMissing
from pykubelet.server.reviews import AccessReviews, Creator, TokenReviews
from pykubelet.tasks import TaskScope


class AccessProblem(Exception):
    """Who may use the API cannot be decided as configured; one line with cause and remedy."""


def make_authenticator(
    config: KubeletConfiguration, client: Creator | None, scope: TaskScope, metrics: ServerMetrics
) -> Authenticator:
    """Make the authenticator that the configuration asks for; raises AccessProblem."""
    wanted = config.authentication
    certificates, tokens = None, None
    if wanted.x509.client_ca_file:
        try:
            certificates = ClientCertificates(Path(wanted.x509.client_ca_file), metrics)
        except (BadAuthorities, OpensslMissing) as err:
            raise AccessProblem(str(err)) from err
    if wanted.webhook.enabled:
        if client is None:
            raise AccessProblem(
                "authentication.webhook needs an API server: set authentication.webhook.enabled to false "
                "to run standalone"
            )
        tokens = TokenReviews(client, scope, wanted.webhook.cache_ttl.seconds, metrics)
    if certificates is None and tokens is None and not wanted.anonymous.enabled:
        raise AccessProblem(
            "nobody could use the API: enable authentication.x509 (clientCAFile), authentication.webhook or "
            "authentication.anonymous, or set enableServer to false"
        )
    return Authenticator(certificates, tokens, anonymous=wanted.anonymous.enabled)


def make_judge(
    config: KubeletConfiguration,
    client: Creator | None,
    node_name: Callable[[], str],
    scope: TaskScope,
    metrics: ServerMetrics,
) -> Judge:
    """Make the judge that the configuration asks for; raises AccessProblem."""
    wanted = config.authorization
    if wanted.mode == "AlwaysAllow":
        return AlwaysAllow()
    if client is None:
        raise AccessProblem(
            "authorization.mode Webhook needs an API server: "
            "set authorization.mode to AlwaysAllow to run standalone"
        )
    return AccessReviews(
        client,
        scope,
        node_name,
        metrics,
        yes_seconds=wanted.webhook.cache_authorized_ttl.seconds,
        no_seconds=wanted.webhook.cache_unauthorized_ttl.seconds,
    )
