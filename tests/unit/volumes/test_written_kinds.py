"""configMap, secret, downwardAPI and projected, from their sources to the files."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from pykubelet.api.pod import Pod
from pykubelet.linux.mounts import unmount
from pykubelet.objects.base import NoObjects
from pykubelet.volumes import file_projection as written
from pykubelet.volumes.errors import VolumeError
from pykubelet.volumes.file_projection import fs_user
from pykubelet.volumes.manager import PodVolumes
from pykubelet.volumes.plugin import MountedVolume
from tests.support.volumes import Shelf, mode_of, mounted_at, needs_root, pod_with, volumes_at

FAILED = "MountVolume.SetUp failed for volume"


def config(name: str = "c", **source: Any) -> dict[str, Any]:
    return {"name": "v", "configMap": {"name": name, **source}}


def projected(*sources: dict[str, Any], **options: Any) -> dict[str, Any]:
    return {"name": "v", "projected": {"sources": list(sources), **options}}


def texts(volume: MountedVolume) -> dict[str, str]:
    """What a container reads."""
    root = Path(volume.path)
    found = {}
    for folder, _, names in os.walk(root / "..data"):
        for name in names:
            path = Path(folder, name).relative_to(root / "..data")
            found[str(path)] = (root / path).read_text(errors="replace")
    return found


async def problems(volumes: PodVolumes, pod: Pod) -> list[str]:
    with pytest.raises(VolumeError) as caught:
        await volumes.mount(pod)
    return list(caught.value.problems)


class TestConfigMap:
    async def test_mount_writes_files(self, root: Path, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.config_maps["c"] = {"a": "1", "b": b"\x00\xff"}
        mounted = await volumes.mount(pod_with(config()))
        path = root / "pods/u-1/volumes/kubernetes.io~configmap/v"
        assert mounted == {"v": MountedVolume(str(path), read_only=True, relabel=True)}
        assert (path / "b").read_bytes() == b"\x00\xff"
        assert texts(mounted["v"])["a"] == "1"
        assert mode_of(path / "..data/a") == "0o644"
        assert (root / "pods/u-1/plugins/kubernetes.io~empty-dir/wrapped_v/ready").exists()

    async def test_mount_items_writes_selected_paths_with_modes(
        self, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        shelf.config_maps["c"] = {"a": "1", "b": "2"}
        items = [{"key": "a", "path": "x/y", "mode": 0o400}, {"key": "b", "path": "z"}]
        volume = (await volumes.mount(pod_with(config(items=items, defaultMode=0o440))))["v"]
        assert texts(volume) == {"x/y": "1", "z": "2"}
        assert mode_of(Path(volume.path, "..data/x/y")) == "0o400"
        assert mode_of(Path(volume.path, "..data/z")) == "0o440"

    @pytest.mark.parametrize(
        ("source", "reason"),
        [
            ({"name": "gone"}, 'configmap "gone" not found'),
            ({"items": [{"key": "z", "path": "z"}]}, "configmap references non-existent config key: z"),
            ({"items": [{"key": "a", "path": "../z"}]}, "invalid path: must not contain '..': ../z"),
            ({"name": "away"}, "failed to get configmap away: the API server is away"),
            ({"name": "away", "optional": True}, "failed to get configmap away: the API server is away"),
        ],
    )
    async def test_mount_invalid_source_raises_and_unmount_leaves_nothing(
        self, root: Path, volumes: PodVolumes, shelf: Shelf, source: dict[str, Any], reason: str
    ) -> None:
        shelf.config_maps["c"] = {"a": "1"}
        shelf.broken.add("away")
        assert await problems(volumes, pod_with(config(**source))) == [f'{FAILED} "v" : {reason}']
        await volumes.unmount("u-1")
        assert not (root / "pods/u-1/volumes/kubernetes.io~configmap").exists()

    async def test_mount_optional_missing_is_empty(self, volumes: PodVolumes, shelf: Shelf) -> None:
        assert texts((await volumes.mount(pod_with(config(optional=True))))["v"]) == {}
        shelf.config_maps["c"] = {"a": "1"}
        items = [{"key": "a", "path": "a"}, {"key": "z", "path": "z"}]
        pod = pod_with(config(items=items, optional=True))
        assert texts((await volumes.mount(pod))["v"]) == {"a": "1"}

    async def test_refresh_changed_data_replaces_files(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.config_maps["c"] = {"a": "1", "b": "1"}
        pod = pod_with(config(), {"name": "e", "emptyDir": {}})
        volume = (await volumes.mount(pod))["v"]
        version = Path(volume.path, "..data").readlink()
        await volumes.refresh(pod)
        assert Path(volume.path, "..data").readlink() == version
        shelf.config_maps["c"] = {"a": "2", "c": "2"}
        await volumes.refresh(pod)
        assert texts(volume) == {"a": "2", "c": "2"}
        assert not os.path.lexists(Path(volume.path, "b"))

    async def test_refresh_config_map_deleted_raises_and_keeps_files(
        self, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        shelf.config_maps["c"] = {"a": "1"}
        pod = pod_with(config())
        volume = (await volumes.mount(pod))["v"]
        del shelf.config_maps["c"]
        with pytest.raises(VolumeError, match='"v" : configmap "c" not found'):
            await volumes.refresh(pod)
        assert texts(volume) == {"a": "1"}

    async def test_refresh_directory_removed_is_recreated(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.config_maps["c"] = {"a": "1"}
        pod = pod_with(config())
        volume = (await volumes.mount(pod))["v"]
        Path(volume.path).rename(Path(volume.path).parent / "elsewhere")
        await volumes.refresh(pod)
        assert texts(volume) == {"a": "1"}

    async def test_mount_and_refresh_large_data_writes_all(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.config_maps["c"] = {"a": "x" * 2 * written.MAX_INLINE_BYTES}
        pod = pod_with(config())
        volume = (await volumes.mount(pod))["v"]
        assert texts(volume) == shelf.config_maps["c"]
        shelf.config_maps["c"] = {"a": "y" * 2 * written.MAX_INLINE_BYTES}
        await volumes.refresh(pod)
        assert texts(volume) == shelf.config_maps["c"]

    @pytest.mark.machine
    @needs_root
    async def test_sub_paths_refresh_keeps_version_until_next_start(
        self, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        shelf.config_maps["c"] = {"a": "1"}
        container = {"name": "main", "image": "i", "volumeMounts": [{"name": "v", "mountPath": "/a"}]}
        pod = pod_with(config(), containers=[container])
        mounted = await volumes.mount(pod)
        main = pod.spec.containers[0]
        bound = Path((await volumes.sub_paths(pod, main, mounted, {0: "a"}))[0])
        shelf.config_maps["c"] = {"a": "2"}
        await volumes.refresh(pod)
        assert bound.read_text() == "1"
        assert texts(mounted["v"]) == {"a": "2"}
        await volumes.sub_paths(pod, main, mounted, {0: "a"})
        assert bound.read_text() == "2", "for the container's next start"
        await volumes.unmount("u-1")
        assert not bound.exists()


@pytest.mark.machine
@needs_root
class TestInMemory:
    async def test_mount_secret_is_tmpfs_with_files(self, root: Path, shelf: Shelf) -> None:
        volumes = volumes_at(root, shelf, lambda pod: 8 << 20)
        shelf.secrets["s"] = {"user": b"me", "pass": b"\xffword"}
        pod = pod_with({"name": "v", "secret": {"secretName": "s", "defaultMode": 0o400}})
        volume = (await volumes.mount(pod))["v"]
        assert volume.path == str(root / "pods/u-1/volumes/kubernetes.io~secret/v")
        (found,) = mounted_at(Path(volume.path))
        assert found.kind == "tmpfs"
        assert "size=8192k" in found.options
        assert Path(volume.path, "pass").read_bytes() == b"\xffword"
        assert mode_of(Path(volume.path, "..data/pass")) == "0o400"
        shelf.secrets["s"] = {"user": b"you"}
        await volumes.refresh(pod)
        assert texts(volume) == {"user": "you"}
        assert len(mounted_at(Path(volume.path))) == 1
        await volumes.unmount("u-1")
        assert not Path(volume.path).exists()

    async def test_mount_secret_or_key_missing_raises(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.secrets["s"] = {"a": b""}
        items = [{"key": "z", "path": "z"}]
        pod = pod_with(
            {"name": "one", "secret": {"secretName": "gone"}},
            {"name": "two", "secret": {"secretName": "s", "items": items}},
            {"name": "three", "secret": {"secretName": "gone", "optional": True}},
        )
        assert await problems(volumes, pod) == [
            f'{FAILED} "one" : secret "gone" not found',
            f'{FAILED} "two" : references non-existent secret key: z',
        ]

    async def test_mount_downward_api_writes_fields_and_resources(self, volumes: PodVolumes) -> None:
        def field(path: str, **more: Any) -> dict[str, Any]:
            return {"path": path.replace(".", "/"), "fieldRef": {"fieldPath": path}, **more}

        def resource(name: str, **more: Any) -> dict[str, Any]:
            return {"path": name, "resourceFieldRef": {"containerName": "main", "resource": name, **more}}

        items = [
            field("metadata.name", mode=0o400),
            field("metadata.uid"),
            field("metadata.labels"),
            field("metadata.annotations"),
            {"path": "tier", "fieldRef": {"fieldPath": "metadata.labels['tier']"}},
            field("spec.nodeName"),
            field("status.hostIP"),
            resource("limits.memory", divisor="1Mi"),
            resource("limits.cpu", divisor="1m"),
            resource("requests.cpu"),
        ]
        resources = {"limits": {"memory": "64Mi"}, "requests": {"cpu": "250m"}}
        pod = pod_with(
            {"name": "v", "downwardAPI": {"items": items}},
            metadata={"labels": {"tier": "x", "app": "y"}, "annotations": {"a": 'say "hi"\n'}},
            nodeName="here",
            containers=[{"name": "main", "image": "i", "resources": resources}],
        )
        volume = (await volumes.mount(pod))["v"]
        assert volume.path.endswith("/kubernetes.io~downward-api/v")
        assert texts(volume) == {
            "metadata/name": "p",
            "metadata/uid": "u-1",
            "metadata/labels": 'app="y"\ntier="x"',
            "metadata/annotations": r'a="say \"hi\"\n"',
            "tier": "x",
            "spec/nodeName": "here",
            "status/hostIP": "192.0.2.2",
            "limits.memory": "64",
            "limits.cpu": "3500",
            "requests.cpu": "1",
        }
        assert mode_of(Path(volume.path, "..data/metadata/name")) == "0o400"
        pod.metadata.labels["app"] = "z"
        await volumes.refresh(pod)
        assert texts(volume)["metadata/labels"] == 'app="z"\ntier="x"'

    async def test_mount_downward_api_unsupported_field_raises(self, volumes: PodVolumes) -> None:
        items = [
            {"path": "a", "fieldRef": {"fieldPath": "spec.everything"}},
            {"path": "b", "fieldRef": {"fieldPath": "status.podIP"}},
            {"path": "c", "resourceFieldRef": {"containerName": "who", "resource": "limits.cpu"}},
        ]
        pod = pod_with({"name": "v", "downwardAPI": {"items": items}})
        assert await problems(volumes, pod) == [
            f'{FAILED} "v" : [unsupported fieldPath: spec.everything, '
            "unsupported fieldPath: status.podIP, container who not found]"
        ]

    async def test_mount_secret_after_reboot_is_rewritten(self, volumes: PodVolumes, shelf: Shelf) -> None:
        """As after a reboot: the folder is there and its mark, but what was in memory is not."""
        shelf.secrets["s"] = {"a": b"1"}
        pod = pod_with({"name": "v", "secret": {"secretName": "s"}})
        volume = (await volumes.mount(pod))["v"]
        assert unmount(Path(volume.path))
        assert texts(volume) == {}
        await volumes.mount(pod)
        assert texts(volume) == {"a": "1"}
        assert len(mounted_at(Path(volume.path))) == 1


@pytest.mark.machine
@needs_root
class TestProjected:
    TOKEN = {"serviceAccountToken": {"path": "token", "expirationSeconds": 3607}}

    async def test_mount_service_account_volume_writes_token_ca_and_namespace(
        self, root: Path, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        shelf.config_maps["kube-root-ca.crt"] = {"ca.crt": "PEM"}
        pod = pod_with(
            projected(
                self.TOKEN,
                {"configMap": {"name": "kube-root-ca.crt", "items": [{"key": "ca.crt", "path": "ca.crt"}]}},
                {
                    "downwardAPI": {
                        "items": [{"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}]
                    }
                },
                defaultMode=0o644,
            )
        )
        volume = (await volumes.mount(pod))["v"]
        assert volume == MountedVolume(
            str(root / "pods/u-1/volumes/kubernetes.io~projected/v"), read_only=True, relabel=True
        )
        assert texts(volume) == {"token": "p//3607/1", "ca.crt": "PEM", "namespace": "default"}
        shelf.generation = 2
        await volumes.refresh(pod)
        assert texts(volume)["token"] == "p//3607/2"

    async def test_mount_all_source_types_writes_files(self, volumes: PodVolumes, shelf: Shelf) -> None:
        shelf.secrets["s"] = {"a": b"secret", "x": b"secret"}
        shelf.config_maps["c"] = {"a": "config", "y": "config"}
        shelf.bundles = {"roots": "PEM1", "example.com/s['live']": "PEM2"}
        pod = pod_with(
            projected(
                {"secret": {"name": "s"}},
                {"configMap": {"name": "c"}},
                {"configMap": {"name": "gone", "optional": True}},
                {"serviceAccountToken": {"path": "t", "audience": "vault"}},
                {"clusterTrustBundle": {"name": "roots", "path": "one.pem"}},
                {
                    "clusterTrustBundle": {
                        "signerName": "example.com/s",
                        "labelSelector": {"matchLabels": {"live": "yes"}},
                        "path": "two.pem",
                    }
                },
                {"clusterTrustBundle": {"name": "gone", "path": "three.pem", "optional": True}},
            )
        )
        assert texts((await volumes.mount(pod))["v"]) == {
            "a": "config",
            "x": "secret",
            "y": "config",
            "t": "p/vault/3600/1",
            "one.pem": "PEM1",
            "two.pem": "PEM2",
            "three.pem": "",
        }

    async def test_mount_several_sources_missing_raises_all_reasons(
        self, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        shelf.secrets["s"] = {}
        shelf.broken.add("token")
        pod = pod_with(
            projected(
                {"configMap": {"name": "a"}},
                {"secret": {"name": "b"}},
                {"secret": {"name": "s", "items": [{"key": "q", "path": "q"}]}},
                self.TOKEN,
                {"clusterTrustBundle": {"path": "p"}},
                {"podCertificate": {"signerName": "s"}},
                {"configMap": {"name": "a"}},
            )
        )
        (problem,) = await problems(volumes, pod)
        assert problem == (
            f'{FAILED} "v" : [configmap "a" not found, secret "b" not found, '
            "references non-existent secret key: q, failed to fetch token: the API server is away, "
            "ClusterTrustBundle projection requires either name or signerName to be set, "
            "credential bundle is not issued yet]"
        )

    async def test_mount_pod_certificate_writes_each_named_file_and_follows_refresh(
        self, volumes: PodVolumes, shelf: Shelf
    ) -> None:
        signer = {"signerName": "example.com/s", "keyType": "ED25519"}
        both = {"keyPath": "two/key.pem", "certificateChainPath": "two/chain.pem"}
        pod = pod_with(
            projected(
                {"podCertificate": signer | {"credentialBundlePath": "one.pem"}},
                {"podCertificate": signer | both},
            )
        )
        mounted = (await volumes.mount(pod))["v"]
        assert texts(mounted) == {
            "one.pem": "key p/v/0/1\nchain p/v/0/1\n",
            "two/key.pem": "key p/v/1/1\n",
            "two/chain.pem": "chain p/v/1/1\n",
        }
        shelf.generation = 2
        await volumes.refresh(pod)
        assert texts(mounted)["two/key.pem"] == "key p/v/1/2\n"
        assert texts(mounted)["two/chain.pem"] == "chain p/v/1/2\n", "both at once, by one rename"

    @pytest.mark.parametrize(
        ("spec", "mode", "user", "group"),
        [
            ({}, "0o644", 0, 0),
            ({"securityContext": {"runAsUser": 7}}, "0o600", 7, 0),
            ({"securityContext": {"fsGroup": 8}}, "0o640", 0, 8),
            ({"securityContext": {"runAsUser": 7, "fsGroup": 8}}, "0o640", 7, 8),
        ],
    )
    async def test_mount_token_mode_and_owner_follow_security_context(
        self, volumes: PodVolumes, spec: dict[str, Any], mode: str, user: int, group: int
    ) -> None:
        name = {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}
        pod = pod_with(projected(self.TOKEN, {"downwardAPI": {"items": [name]}}), **spec)
        data = Path((await volumes.mount(pod))["v"].path, "..data")
        token, other = (data / "token").stat(), (data / "name").stat()
        assert (mode_of(data / "token"), token.st_uid, token.st_gid) == (mode, user, group)
        assert (mode_of(data / "name"), other.st_uid, other.st_gid) == ("0o644", 0, group)

    async def test_mount_standalone_token_raises(self, root: Path) -> None:
        volumes = volumes_at(root, NoObjects())
        name = {"path": "name", "fieldRef": {"fieldPath": "metadata.name"}}
        about_itself = {"downwardAPI": {"items": [name]}}
        assert texts((await volumes.mount(pod_with(projected(about_itself))))["v"]) == {"name": "p"}
        (problem,) = await problems(volumes, pod_with(projected(about_itself, self.TOKEN)))
        assert "no API server" in problem

    async def test_mount_nested_volume_creates_mount_point(self, volumes: PodVolumes) -> None:
        mounts = [{"name": "v", "mountPath": "/v"}, {"name": "data", "mountPath": "/v/in/side"}]
        pod = pod_with(
            projected(self.TOKEN),
            {"name": "data", "emptyDir": {}},
            containers=[{"name": "main", "image": "i", "volumeMounts": mounts}],
        )
        path = Path((await volumes.mount(pod))["v"].path)
        await volumes.refresh(pod)
        assert (path / "in/side").is_dir()


@pytest.mark.parametrize(
    ("pod_user", "users", "user"),
    [
        (None, [None], None),
        (5, [None], 5),
        (5, [None, 6], None),
        (5, [6, 6], 6),
        (None, [6, None], None),
        (None, [0, 0], 0),
    ],
)
def test_fs_user_same_user_in_all_containers_returns_user(
    pod_user: int | None, users: list[int | None], user: int | None
) -> None:
    containers = [
        {"name": f"c{i}", "image": "i", "securityContext": {"runAsUser": own} if own is not None else {}}
        for i, own in enumerate(users)
    ]
    context = {"runAsUser": pod_user} if pod_user is not None else {}
    assert fs_user(pod_with(containers=containers[:1], securityContext=context)) == (
        users[0] if users[0] is not None else pod_user
    )
    pod = pod_with(securityContext=context, containers=containers[:1], initContainers=containers[1:])
    assert fs_user(pod) == user


@pytest.mark.parametrize("context", [{}, {"runAsUser": 0}], ids=["image's user", "another user"])
def test_fs_user_ephemeral_container_does_not_count(context: dict[str, int]) -> None:
    """Verify that a debug container does not open the pod's tokens to every process of the pod."""
    debugger = {"name": "debugger", "image": "i", "securityContext": context}
    user = {"name": "main", "image": "i", "securityContext": {"runAsUser": 1000}}
    assert fs_user(pod_with(containers=[user], ephemeralContainers=[debugger])) == 1000


class TestTogether:
    async def test_mount_sources_fetched_concurrently(self, root: Path) -> None:
        """Each of two volumes waits until the other one is asked for, too."""
        both = asyncio.Barrier(2)

        class Waiting(Shelf):
            async def config_map(self, pod: Pod, name: str) -> Any:
                await both.wait()
                return await super().config_map(pod, name)

        volumes = volumes_at(root, Waiting(config_maps={"a": {"k": "1"}, "b": {"k": "2"}}))
        pod = pod_with({"name": "x", "configMap": {"name": "a"}}, {"name": "y", "configMap": {"name": "b"}})
        async with asyncio.timeout(30):
            mounted = await volumes.mount(pod)
        assert [texts(mounted[name]) for name in "xy"] == [{"k": "1"}, {"k": "2"}]

    async def test_mount_source_hangs_is_cancellable(self, root: Path) -> None:
        class Silent(Shelf):
            async def config_map(self, pod: Pod, name: str) -> Any:
                await asyncio.Event().wait()

        volumes = volumes_at(root, Silent())
        pod = pod_with(config(), {"name": "data", "emptyDir": {}})
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await volumes.mount(pod)

    async def test_refresh_without_projected_volumes_writes_nothing(
        self, root: Path, volumes: PodVolumes
    ) -> None:
        await volumes.refresh(
            pod_with({"name": "e", "emptyDir": {}}, {"name": "h", "hostPath": {"path": "/"}})
        )
        assert not root.exists()
