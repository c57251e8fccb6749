"""Images that the node e2e suite pulls, built from programs of this host and of our Go module.

Nothing is downloaded: busybox, bash and the pause process are Debian's, agnhost and nonewprivs are built from
upstream's sources, curl, ipcs, nc, nginx and nmeter are programs of ours (`module/standins`). The names come
from the suite itself (`--list-images`), so a new Kubernetes version needs no change here. Specs of images
that are not in `BUILDERS` fail to pull.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from pykubelet.devcluster.identities import Authority, Subject, issue_pem
from pykubelet.standalone.requirements import HostRequirements
from pykubelet.standalone.seed_images import (
    Entry,
    ImageConfig,
    Platform,
    busybox_entries,
    image_archive,
    machine_platform,
    read_static,
)
from tests.support.image_registry import Registry, unpack_archive

MIRRORED = ("registry.k8s.io", "invalid.registry.k8s.io", "docker.io", "gcr.io")
"""Registries that containerd replaces by the local one; what that does not have does not exist."""
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL = Path("/bin/bash-static")
_SETUID = 0o4755
_PAUSE_USER = "65535:65535"
_AGNHOST_USERS = {
    "etc/passwd": "user-defined-in-image:x:1000:1000::/home/user-defined-in-image:/bin/sh\n",
    "etc/group": "user-defined-in-image:x:1000:\ngroup-defined-in-image:x:50000:user-defined-in-image\n",
}
"""A user of the agnhost image and its group, which specs of SupplementalGroups expect."""
_CHOOSE_SHELL = """#!/bin/bash
while IFS= read -r -d '' variable; do
    [[ $variable =~ ^[A-Za-z_][A-Za-z0-9_]*= ]] || exec -a /bin/sh /bin/bash "$@"
done </proc/self/environ
exec -a /bin/sh /bin/busybox "$@"
"""
"""The shell of the busybox image: busybox' own, whose error messages specs compare, unless the environment
has variables that it would drop."""
_REGISTRY_TAG = "testing"
"""The tag of the pause image in the registry that agnhost serves."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Contents of the programs that images are built from."""

    busybox: bytes
    applets: tuple[str, ...]
    shell: bytes
    """A static bash: Debian's busybox sh drops variables whose names are not identifiers, and runs its own
    applets instead of programs in PATH."""
    pause: bytes
    agnhost: bytes
    nonewprivs: bytes
    standins: bytes
    certificate: bytes
    """Serving certificate of agnhost's HTTPS servers, PEM."""
    key: bytes
    platform: Platform


@dataclass(frozen=True, slots=True)
class Image:
    """The files and the configuration of an image without its name."""

    entries: list[Entry]
    config: ImageConfig

    def archive(self, name: str, platform: Platform) -> bytes:
        """Return the OCI archive of the image; its digest depends on the name."""
        config = replace(self.config, labels={"name": name})
        return image_archive(name, self.entries, config, platform)


def read_programs(machine: HostRequirements, built: Path, authority: Authority) -> Programs:
    """Read the programs of this host and those built from the Go module in `built`.

    The certificate that agnhost serves is issued by `authority`. Raises EmbeddedError when a program is
    missing or dynamically linked.
    """
    busybox = machine.programs["busybox"]
    certificate, key = issue_pem(authority, Subject("localhost", server_names=("localhost", "127.0.0.1")))
    listed = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    return Programs(
        busybox=read_static(busybox),
        applets=tuple(listed.stdout.split()),
        shell=read_static(SHELL),
        pause=read_static(machine.programs["catatonit"]),
        agnhost=read_static(built / "agnhost"),
        nonewprivs=read_static(built / "nonewprivs"),
        standins=read_static(built / "standins"),
        certificate=certificate,
        key=key,
        platform=machine_platform(os.uname().machine),
    )


def push_images(registry: Registry, programs: Programs, names: Iterable[str]) -> dict[str, str]:
    """Push a stand-in for each of the names that has one, and return their digests by name."""
    pushed = {}
    for name in names:
        repository, tag = split_name(name)
        if (build := BUILDERS.get(repository)) is not None:
            archive = build(programs).archive(name, programs.platform)
            pushed[name] = registry.push_archive(repository, tag, archive)
    return pushed


def split_name(name: str) -> tuple[str, str]:
    """Split `registry/repository:tag` into repository and tag."""
    repository, _, tag = name.partition("/")[2].rpartition(":")
    return repository, tag


def mirror_hosts(host: str) -> str:
    """Return the hosts.toml that makes the registry at `host` replace another one."""
    return f'server = "http://{host}"\n\n[host."http://{host}"]\ncapabilities = ["pull", "resolve"]\n'


def _busybox(programs: Programs) -> Image:
    image = _with_bash(programs)
    entries = [entry for entry in image.entries if entry.path != "bin/sh"]
    return replace(image, entries=[*entries, Entry("bin/sh", data=_CHOOSE_SHELL.encode())])


def _with_bash(programs: Programs) -> Image:
    """Return a busybox image whose shell is bash: it runs programs in PATH that are also busybox applets."""
    entries = busybox_entries(programs.busybox, set(programs.applets) - {"sh"})
    entries += [Entry("bin/bash", data=programs.shell), Entry("bin/sh", link="bash")]
    if "nmeter" not in programs.applets:  # Debian's busybox has none
        entries.append(Entry("usr/bin/nmeter", data=programs.standins))
    return Image(entries, ImageConfig(command=["sh"], env={"PATH": PATH}))


def _pause(programs: Programs) -> Image:
    entries = [Entry("pause", data=programs.pause)]
    return Image(entries, ImageConfig(entrypoint=["/pause", "-P"], user=_PAUSE_USER))


def _nonroot(programs: Programs) -> Image:
    image = _with_bash(programs)
    return replace(image, config=replace(image.config, user="1234"))


def _nonewprivs(programs: Programs) -> Image:
    image = _with_bash(programs)
    entries = [*image.entries, Entry("usr/local/bin/nnp", data=programs.nonewprivs, mode=_SETUID)]
    return Image(entries, replace(image.config, command=["nnp"]))


def _nginx(programs: Programs) -> Image:
    image = _with_bash(programs)
    entries = [*image.entries, Entry("usr/sbin/nginx", data=programs.standins), Entry("var/run")]
    return Image(entries, replace(image.config, command=["nginx"]))


def _ipc_utils(programs: Programs) -> Image:
    image = _with_bash(programs)
    return replace(image, entries=[*image.entries, Entry("usr/bin/ipcs", data=programs.standins)])


def _agnhost(programs: Programs) -> Image:
    image = _with_bash(programs)
    entries = [
        replace(entry, data=entry.data + _AGNHOST_USERS[entry.path].encode())
        if entry.path in _AGNHOST_USERS and entry.data is not None
        else entry
        for entry in image.entries
    ]
    entries += [
        Entry("agnhost", data=programs.agnhost),
        Entry("agnhost-2", link="agnhost"),
        Entry("usr/bin/curl", data=programs.standins),
        Entry("usr/local/bin/nc", link="../../bin/curl"),  # busybox' has no UDP
        Entry("localhost.crt", data=programs.certificate, mode=0o644),
        Entry("localhost.key", data=programs.key, mode=0o644),
        Entry("uploads"),
        *_served_registry(programs),
    ]
    return Image(entries, replace(image.config, entrypoint=["/agnhost"], command=["pause"]))


def _served_registry(programs: Programs) -> list[Entry]:
    """Return the files of the registry that `agnhost fake-registry-server` serves: one pause image."""
    archive = _pause(programs).archive(f"pause:{_REGISTRY_TAG}", programs.platform)
    descriptor, blobs = unpack_archive(archive)
    root = "var/registry/pause"
    entries = [Entry(f"{root}/manifests/{_REGISTRY_TAG}", data=descriptor["digest"].encode(), mode=0o644)]
    for digest, blob in blobs.items():
        kind = "manifests" if digest == descriptor["digest"] else "blobs"
        algorithm, _, value = digest.partition(":")
        entries.append(Entry(f"{root}/{kind}/{algorithm}/{value[:2]}/{value}/data", data=blob, mode=0o644))
    return entries


BUILDERS: dict[str, Callable[[Programs], Image]] = {
    "pause": _pause,
    "e2e-test-images/agnhost": _agnhost,
    "e2e-test-images/busybox": _busybox,
    "e2e-test-images/glibc-dns-testing": _with_bash,
    "e2e-test-images/ipc-utils": _ipc_utils,
    "e2e-test-images/nginx": _nginx,
    "e2e-test-images/nonewprivs": _nonewprivs,
    "e2e-test-images/nonroot": _nonroot,
}
"""What is built for each repository of registry.k8s.io."""
