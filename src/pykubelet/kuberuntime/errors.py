"""Errors of the sandbox and container configs of a pod.

The caller maps them: for a container to the waiting reason `CreateContainerConfigError` with the text as
message, for a sandbox to the event `FailedCreatePodSandBox`. Users read the texts, and tools match
upstream's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pykubelet.api.downward_api import ExpansionTooLongError


class ContainerConfigError(Exception):
    """The pod spec cannot be converted to a CRI config."""


class InvalidHostname(ContainerConfigError):
    """The pod's hostname, subdomain or FQDN is invalid."""


class MissingSource(ContainerConfigError):
    """A configMap or secret does not exist; ignored if the reference to it is optional."""


class ServicesNotSynced(ContainerConfigError):
    """The services of the cluster have not been listed yet; retried after SERVICES_SECONDS."""


class RootNotAllowed(ContainerConfigError):
    """The container has runAsNonRoot, and its user is root or cannot be verified."""


class StartError(Exception):
    """A container could not be started; `reason` is the waiting reason of its status."""

    def __init__(self, reason: str, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        """Seconds until the retry, if known."""


@contextmanager
def convert_expansion_errors() -> Iterator[None]:
    """Convert ExpansionTooLongError to ContainerConfigError; a context manager and decorator."""
    try:
        yield
    except ExpansionTooLongError as err:
        raise ContainerConfigError(str(err)) from err
