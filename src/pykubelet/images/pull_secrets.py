"""A pod's pull secrets, from the names in `imagePullSecrets` to their contents.

One that cannot be had is an event, not an end: the image may be public, or another secret may do.
"""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.images.credentials import PullSecret
from pykubelet.logs import get_logger
from pykubelet.pods.journal import Journal
from pykubelet.pods.objects import ObjectError, PodObjects

log = get_logger(__name__)


async def pull_secrets(pod: Pod, objects: PodObjects, journal: Journal) -> list[PullSecret]:
    """Give the pull secrets that can be had, in the pod's order."""
    found, failed = [], []
    for reference in pod.spec.image_pull_secrets:
        if not reference.name:
            continue
        try:
            secret = await objects.secret(pod, reference.name)
        except ObjectError as err:
            log.info(
                "Unable to retrieve pull secret, the image pull may not succeed",
                pod=pod.full_name,
                secret=reference.name,
                err=err,
            )
            failed.append(reference.name)
        else:
            namespace, uid = pod.metadata.namespace, secret.metadata.uid
            found.append(PullSecret(namespace, reference.name, secret.type, secret.data, uid))
    if failed:
        journal.event(
            pod,
            "Warning",
            "FailedToRetrieveImagePullSecret",
            f"Unable to retrieve some image pull secrets ({', '.join(failed)}); "
            "attempting to pull the image may not succeed.",
        )
    return found
