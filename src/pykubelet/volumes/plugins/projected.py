"""projected: the files of several sources in one volume, in memory only.

Nearly every pod of a cluster has one, with its service account's token, the cluster's root certificates and
its namespace. Sources are fetched concurrently; an error contains the reasons of all that failed.
"""

from __future__ import annotations

from pykubelet.api.pod import Pod
from pykubelet.api.volume import (
    DEFAULT_MODE,
    DEFAULT_TOKEN_SECONDS,
    PodCertificateProjection,
    ProjectedToken,
    ProjectedTrustBundle,
    ProjectedVolume,
    Projection,
)
from pykubelet.objects.base import ObjectError, ObjectNotFound
from pykubelet.volumes.errors import VolumePluginError, join_reasons
from pykubelet.volumes.file_projection import File, FileVolumeWriter, fs_user
from pykubelet.volumes.operations import run_concurrently
from pykubelet.volumes.plugin import BaseVolumePlugin, MountedVolume, VolumeHost, VolumeToMount
from pykubelet.volumes.plugins.config_map import config_map_files
from pykubelet.volumes.plugins.downward_api import downward_files
from pykubelet.volumes.plugins.secret import secret_files

_PRIVATE = 0o600


class ProjectedPlugin(BaseVolumePlugin):
    """Plugin for projected volumes."""

    directory_name = "kubernetes.io~projected"
    live = True
    slow = False

    def __init__(self, host: VolumeHost) -> None:
        self._host = host
        self._writer = FileVolumeWriter(host, self.directory_name, in_memory=True)

    async def set_up(self, volume: VolumeToMount) -> MountedVolume:
        """Write the files of the current sources."""
        pod, source = volume.pod, volume.source
        assert isinstance(source, ProjectedVolume)
        mode = DEFAULT_MODE if source.default_mode is None else source.default_mode
        name = volume.pod_volume.name
        collected = await run_concurrently(
            [self._collected(pod, name, index, part, mode) for index, part in enumerate(source.sources)]
        )
        files: dict[str, File] = {}
        problems = []
        for part in collected:
            if isinstance(part, str):
                problems.append(part)
            else:
                files |= part
        if problems:
            raise VolumePluginError(join_reasons(problems))
        return await self._writer.write(pod, volume.name, files)

    async def _collected(
        self, pod: Pod, volume: str, index: int, source: Projection, mode: int
    ) -> dict[str, File] | str:
        """Return the files of one source, or the reason of its failure."""
        try:
            if source.pod_certificate is not None:
                return await self._certificate(pod, volume, index, source.pod_certificate, mode)
            return await self._files(pod, source, mode)
        except (VolumePluginError, ObjectError) as err:
            return str(err)

    async def _files(self, pod: Pod, source: Projection, mode: int) -> dict[str, File]:
        objects = self._host.objects
        if (keys := source.secret) is not None:
            optional = keys.optional is True
            return await secret_files(objects, pod, keys.name, keys.items, mode, optional=optional)
        if (keys := source.config_map) is not None:
            optional = keys.optional is True
            return await config_map_files(objects, pod, keys.name, keys.items, mode, optional=optional)
        if source.downward_api is not None:
            return downward_files(self._host, pod, source.downward_api.items, mode)
        if source.service_account_token is not None:
            return await self._token(pod, source.service_account_token, mode)
        if source.cluster_trust_bundle is not None:
            return await self._trust_bundle(pod, source.cluster_trust_bundle, mode)
        return {}

    async def _certificate(
        self, pod: Pod, volume: str, index: int, source: PodCertificateProjection, mode: int
    ) -> dict[str, File]:
        bundle = await self._host.objects.pod_certificate(pod, volume, index, source)
        texts = {
            source.credential_bundle_path: bundle.private_key + bundle.certificate_chain,
            source.key_path: bundle.private_key,
            source.certificate_chain_path: bundle.certificate_chain,
        }
        return {path: _identity_file(pod, text, mode) for path, text in texts.items() if path}

    async def _token(self, pod: Pod, source: ProjectedToken, mode: int) -> dict[str, File]:
        seconds = DEFAULT_TOKEN_SECONDS if source.expiration_seconds is None else source.expiration_seconds
        token = await self._host.objects.token(pod, audience=source.audience, seconds=seconds)
        return {source.path: _identity_file(pod, token, mode)}

    async def _trust_bundle(self, pod: Pod, source: ProjectedTrustBundle, mode: int) -> dict[str, File]:
        objects, text = self._host.objects, ""
        try:
            if source.name is not None:
                text = await objects.trust_bundle(pod, name=source.name)
            elif source.signer_name is not None:
                text = await objects.trust_bundle(
                    pod, signer=source.signer_name, selector=source.label_selector
                )
            else:
                raise VolumePluginError(
                    "ClusterTrustBundle projection requires either name or signerName to be set"
                )
        except ObjectNotFound:
            if not source.optional:
                raise
        return {source.path: _identity_file(pod, text, mode)}


def _identity_file(pod: Pod, text: str, mode: int) -> File:
    """Return a file with mode 0600 if its readers in the pod are known, otherwise with `mode`.

    Known readers are the single user of all containers, which owns the file, or the pod's fsGroup, to which
    the writer grants access.
    """
    user = fs_user(pod)
    private = user is not None or pod.spec.security_context.fs_group is not None
    return File(text.encode(), _PRIVATE if private else mode, user)
