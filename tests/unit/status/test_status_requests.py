"""The sender's requests as they are on the wire."""

import asyncio

import msgspec

from pykubelet.api.meta import to_document
from pykubelet.apiserver.client import ApiClient
from pykubelet.status.manager import StatusManager
from pykubelet.util.tasks import TaskScope
from tests.support.api_client import access, authority, client, opened, server, server_pair  # noqa: F401
from tests.support.api_server import Server, answer, refuse
from tests.support.pods import make_pod, make_status


async def test_status_manager_sends_strategic_merge_patch_and_delete_with_uid(
    server: Server,  # noqa: F811
    client: ApiClient,  # noqa: F811
) -> None:
    pod = make_pod()
    written = msgspec.structs.replace(pod, status=make_status())
    server.say(refuse(500, "InternalError", "etcd"), answer(to_document(written)), answer({"kind": "Status"}))
    sender = StatusManager(client, get_object=lambda uid: pod, may_run=lambda uid: False)
    async with TaskScope() as scope:
        scope.start(sender.run(), name="sender")
        sender.set_status(pod, make_status())
        async with asyncio.timeout(90):
            await sender.wait_reported(pod.uid)
            await sender.remove(pod)
    first, patch, delete = server.seen
    assert first.body == patch.body
    assert (patch.method, patch.path) == ("PATCH", "/api/v1/namespaces/default/pods/web/status")
    assert patch.header("Content-Type") == "application/strategic-merge-patch+json"
    assert patch.json["metadata"] == {"uid": "u1"}
    assert patch.json["status"]["phase"] == "Running"
    assert patch.json["status"]["startTime"] == "2026-01-01T00:00:00Z"
    assert (delete.method, delete.path) == ("DELETE", "/api/v1/namespaces/default/pods/web")
    assert delete.json["gracePeriodSeconds"] == 0
    assert delete.json["preconditions"] == {"uid": "u1"}
