"""What can be wrong with a pod when its requests to the runtime are made.

Whoever asks decides what a problem becomes: for a container it is the waiting reason
`CreateContainerConfigError` with the problem's text as the message, for a sandbox the event
`FailedCreatePodSandBox`. The texts are read by users, and by tools that know the reference's words.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pykubelet.api.downward_api import ExpansionTooLongError


class ContainerConfigError(Exception):
    """The pod asks for something that cannot be put into a request."""


class InvalidHostname(ContainerConfigError):
    """The pod's host name, subdomain or full name cannot be used."""


class MissingSource(ContainerConfigError):
    """A configMap or secret does not exist; forgiven where the reference to it is optional."""


class ServicesNotSynced(ContainerConfigError):
    """The services of the cluster have not been listed yet; that is a matter of moments."""


class RootNotAllowed(ContainerConfigError):
    """The container must not run as root and would, or may."""


@contextmanager
def growth_is_a_problem() -> Iterator[None]:
    """Raise ConfigProblem when the block, or the function that is decorated, lets a text grow too long."""
    try:
        yield
    except ExpansionTooLongError as err:
        raise ContainerConfigError(str(err)) from err
