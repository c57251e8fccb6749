"""Secrets that volumes name, for servers and drivers: a pod's own namespace, or any for persistent ones."""

from __future__ import annotations

from pykubelet.api.core import Secret
from pykubelet.api.volume_sources import SecretReference
from pykubelet.kube.errors import KubeError
from pykubelet.kube.resources import SECRETS
from pykubelet.pods.objects import ObjectError
from pykubelet.volumes.errors import KindError
from pykubelet.volumes.kind import Surroundings, Wanted


async def named_secret(given: Surroundings, wanted: Wanted, reference: SecretReference) -> Secret:
    """Give a secret; raises KindError."""
    own = wanted.pod.metadata.namespace
    namespace = (wanted.persistent is not None and reference.namespace) or own
    try:
        if namespace == own:
            return await given.objects.secret(wanted.pod, reference.name)
        if given.api is None:
            raise ObjectError("this node belongs to no cluster")
        return await given.api.get(SECRETS, reference.name, namespace)
    except (ObjectError, KubeError) as err:
        raise KindError(f"couldn't get secret {namespace}/{reference.name} err: {err}") from err
