"""A pod's pull secrets, from their names to a pull."""

import base64
import json

import pytest

from pykubelet.api.core import Secret
from pykubelet.api.meta import ObjectMeta
from pykubelet.api.pod import NamedRef, Pod
from pykubelet.images.credentials import Credentials, SecretCoordinates, pull_secrets, secrets_keyring
from pykubelet.objects.base import NoObjects, ObjectNotFound
from pykubelet.podconfig.pod_history import PodHistory
from tests.support.image_service import a_pod

REGISTRY = "registry.example.com"


def login(user: str) -> dict[str, dict[str, str]]:
    return {REGISTRY: {"auth": base64.b64encode(f"{user}:hunter2".encode()).decode()}}


SECRETS = {
    "new": Secret(
        metadata=ObjectMeta(name="new", namespace="default", uid="secret-1"),
        type="kubernetes.io/dockerconfigjson",
        data={".dockerconfigjson": json.dumps({"auths": login("new")}).encode()},
    ),
    "old": Secret(type="kubernetes.io/dockercfg", data={".dockercfg": json.dumps(login("old")).encode()}),
    "other": Secret(type="Opaque", data={"password": b"hunter2"}),
}


class Secrets(NoObjects):
    async def secret(self, pod: Pod, name: str) -> Secret:
        if name not in SECRETS:
            raise ObjectNotFound(f'secret "{name}" not found')
        return SECRETS[name]


def pulling(*names: str) -> Pod:
    pod = a_pod(f"{REGISTRY}/app:1")
    pod.spec.image_pull_secrets = [NamedRef(name=name) for name in names]
    return pod


@pytest.mark.parametrize(
    ("names", "users"),
    [
        ((), []),
        (("new",), ["new"]),
        (("old", "new"), ["old", "new"]),
        (("other", "", "new"), ["new"]),
    ],
)
async def test_pull_secrets_credentials_in_pod_spec_order(names: tuple[str, ...], users: list[str]) -> None:
    journal, pod = PodHistory(), pulling(*names)
    secrets = await pull_secrets(pod, Secrets(), journal)
    found = secrets_keyring(secrets).lookup(f"{REGISTRY}/app")
    assert found == [Credentials(user, "hunter2") for user in users]
    assert journal.events(pod.uid) == []
    assert "hunter2" not in repr(secrets)


async def test_pull_secrets_carry_secret_coordinates() -> None:
    secrets = await pull_secrets(pulling("new"), Secrets(), PodHistory())
    [credentials] = secrets_keyring(secrets).lookup(f"{REGISTRY}/app")
    assert credentials.source == SecretCoordinates("secret-1", "default", "new")


async def test_pull_secrets_missing_records_event_and_is_skipped() -> None:
    journal, pod = PodHistory(), pulling("absent", "new", "gone")
    secrets = await pull_secrets(pod, Secrets(), journal)
    assert [secret.name for secret in secrets] == ["new"]
    (event,) = journal.events(pod.uid)
    assert (event.kind, event.reason, event.where) == ("Warning", "FailedToRetrieveImagePullSecret", "")
    assert event.message == (
        "Unable to retrieve some image pull secrets (absent, gone); "
        "attempting to pull the image may not succeed."
    )
