from pykubelet.api.meta import from_document
from pykubelet.api.pod import Pod
from pykubelet.cm.devices.run_options import DeviceNode
from pykubelet.kuberuntime.configuration.options import block_volumes, extra_groups, mounted_image_volumes
from pykubelet.volumes.plugin import MountedVolume

MOUNTED = {
    "files": MountedVolume("/f", group=1234),
    "disk": MountedVolume("", device="/pods/disk", group=99),
    "old": MountedVolume("", device="/pods/old", read_only=True),
    "tools": MountedVolume("", image="registry/tools:1", read_only=True),
    "more": MountedVolume("", image="registry/more", read_only=True),
    "unused": MountedVolume("", image="registry/unused", read_only=True),
}


def pod() -> Pod:
    mounts = [{"name": name, "mountPath": f"/{name}"} for name in ("files", "tools", "more")]
    return from_document(
        Pod,
        {
            "spec": {
                "containers": [{"name": "main", "image": "i", "volumeMounts": mounts}],
                "securityContext": {"supplementalGroups": [99]},
                "volumes": [
                    {"name": "tools", "image": {"reference": "registry/tools:1", "pullPolicy": "Never"}},
                    {"name": "more", "image": {"reference": "registry/more"}},
                ],
            }
        },
    )


def test_block_volumes_returns_device_nodes() -> None:
    assert block_volumes(MOUNTED) == {
        "disk": DeviceNode("/pods/disk", "", "mrw"),
        "old": DeviceNode("/pods/old", "", "r"),
    }


def test_extra_groups_volume_group_not_in_spec_returned() -> None:
    assert extra_groups(pod(), MOUNTED.values()) == (1234,)
    assert extra_groups(pod(), ()) == ()


def test_mounted_image_volumes_returns_mounted_images_and_pull_policy() -> None:
    assert mounted_image_volumes(pod(), pod().spec.containers[0], MOUNTED) == {
        "tools": ("registry/tools:1", "Never"),
        "more": ("registry/more", "Always"),
    }
