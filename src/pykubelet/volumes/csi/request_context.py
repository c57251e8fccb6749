"""Context of CSI requests: secrets, pod information and tokens of the pod's service account."""

from __future__ import annotations

import base64
from datetime import UTC, datetime
from typing import Any

import msgspec

from pykubelet.api.storage import CsiDriverSpec
from pykubelet.api.volume import SecretReference
from pykubelet.apiserver.client import SECRETS, ApiClient
from pykubelet.apiserver.errors import KubeError
from pykubelet.objects.base import ObjectError, PodObjects
from pykubelet.objects.fetch import err_text
from pykubelet.volumes.csi.names import KIND
from pykubelet.volumes.csi.types import Context
from pykubelet.volumes.csi.volume import CsiVolume, pod_info
from pykubelet.volumes.errors import VolumePluginError

TOKENS = "csi.storage.k8s.io/serviceAccount.tokens"
HOUR = 3600


class CsiRequestContext:
    """Builder of request contexts; raises VolumePluginError if a secret or token is not available."""

    def __init__(self, api: ApiClient | None, objects: PodObjects) -> None:
        self._api = api
        self._objects = objects

    async def for_staging(self, volume: CsiVolume, published: dict[str, str]) -> Context:
        """Return the context of NodeStageVolume; `published` is the publish context of the attachment."""
        secrets = await self._secret(volume, "NodeStageSecretRef", volume.stage_secret)
        return Context(published, volume.attributes, secrets)

    async def for_publishing(
        self, volume: CsiVolume, published: dict[str, str], spec: CsiDriverSpec | None, *, standalone: bool
    ) -> Context:
        """Return the context of NodePublishVolume.

        Without a cluster there is no CSIDriver object with `podInfoOnMount`: then ephemeral volumes get the
        pod information, because most of their drivers require it and the others ignore it.
        """
        secrets = await self._secret(volume, "NodePublishSecretRef", volume.publish_secret)
        attributes = dict(volume.attributes)
        if (spec is not None and spec.pod_info_on_mount) or (standalone and volume.ephemeral):
            attributes |= pod_info(volume)
        # Block volumes are published without tokens.
        if spec is not None and spec.token_requests and not volume.volume_to_mount.block:
            tokens = {TOKENS: await self._tokens(volume, spec)}
            if spec.service_account_token_in_secrets:
                secrets |= tokens
            else:
                attributes |= tokens
        return Context(published, attributes, secrets)

    async def for_expanding(self, volume: CsiVolume) -> dict[str, str]:
        """Return the secrets of NodeExpandVolume."""
        return await self._secret(volume, "NodeExpandSecretRef", volume.expand_secret)

    async def _secret(self, volume: CsiVolume, field: str, ref: SecretReference | None) -> dict[str, str]:
        if ref is None:
            return {}
        try:
            if volume.ephemeral:
                found = await self._objects.secret(volume.volume_to_mount.pod, ref.name)
            elif self._api is not None:
                found = await self._api.get(SECRETS, ref.name, ref.namespace)
            else:
                raise ObjectError("this node has no API server to ask")
        except (ObjectError, KubeError) as err:
            reason = err_text(err) if isinstance(err, KubeError) else str(err)
            raise VolumePluginError(
                f"fetching {field} {ref.namespace}/{ref.name} failed: {KIND}: failed to find the secret "
                f"{ref.name} in the namespace {ref.namespace} with error: {reason}"
            ) from err
        try:
            return {key: value.decode() for key, value in found.data.items()}
        except UnicodeDecodeError:
            raise VolumePluginError(
                f"fetching {field} {ref.namespace}/{ref.name} failed: {KIND}: the secret has a value that is "
                "no text in UTF-8, which CSI has no place for: encode it as the driver expects it"
            ) from None

    async def _tokens(self, volume: CsiVolume, spec: CsiDriverSpec) -> str:
        found = {}
        for token_request in spec.token_requests:
            try:
                token = await self._objects.token(
                    volume.volume_to_mount.pod,
                    audience=token_request.audience,
                    seconds=token_request.expiration_seconds or HOUR,
                )
            except ObjectError as err:
                raise VolumePluginError(
                    f"{KIND}: mounter.SetUpAt failed to get service accoount token attributes: {err}"
                ) from err
            found[token_request.audience] = {"token": token, "expirationTimestamp": token_end(token)}
        return msgspec.json.encode(dict(sorted(found.items()))).decode()


def token_end(token: str) -> str | None:
    """Return when a token expires, in RFC 3339, or None if the token does not contain it.

    A token whose lifetime the API server extended beyond the request, for old clients, contains the time of
    its renewal (`warnafter`), which is returned instead.
    """
    try:
        part = token.split(".")[1]
        claims: Any = msgspec.json.decode(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        kubernetes_claims = claims.get("kubernetes.io", {})
        moment = kubernetes_claims.get("warnafter") or claims["exp"]
        return datetime.fromtimestamp(int(moment), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, msgspec.MsgspecError):
        return None
