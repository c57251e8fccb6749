"""Tokens over their life, with a clock of the test's own."""

import asyncio

import pytest

from pykubelet.api.pod import Pod
from pykubelet.apiserver.errors import Forbidden, KubeError, NotFound, StatusDetails, Unreachable
from pykubelet.objects.base import ObjectError
from pykubelet.objects.fetch import RETRY_DELAYS_SECONDS
from pykubelet.objects.tokens import TokenCache
from tests.support.object_api import ObjectApi, pod

AWAY = Unreachable("https://api", "connection refused")
HOUR = 3600.0


@pytest.fixture
def api() -> ObjectApi:
    return ObjectApi()


@pytest.fixture
def tokens(api: ObjectApi) -> TokenCache:
    return TokenCache(api, clock=lambda: api.clock, rng=lambda: 0.0)


async def test_token_cache_request_is_bound_to_pod(api: ObjectApi, tokens: TokenCache) -> None:
    await tokens.get(pod(account="builder"), audiences=("vault",), seconds=900, account_uid="sa-1")
    assert [asked[:2] for asked in api.asked] == [("create", "serviceaccounts/shop/builder/token")]
    (request,) = api.tokens
    assert (request.spec.audiences, request.spec.expiration_seconds) == (["vault"], 900)
    bound = request.spec.bound_object_ref
    assert bound is not None
    assert (bound.kind, bound.name, bound.uid) == ("Pod", "web", "uid-web")
    assert request.metadata.uid == "sa-1"


async def test_token_cache_reuses_token_until_80_percent_of_lifetime(
    api: ObjectApi, tokens: TokenCache
) -> None:
    web = pod()
    assert await tokens.get(web, seconds=3600) == "token-1"
    api.clock = 0.8 * HOUR
    assert await tokens.get(web, seconds=3600) == "token-1"
    api.clock += 1
    assert await tokens.get(web, seconds=3600) == "token-2"
    api.clock += 0.8 * HOUR
    assert await tokens.get(web, seconds=3600) == "token-2"


async def test_token_cache_long_lived_token_is_renewed_daily(api: ObjectApi, tokens: TokenCache) -> None:
    web, year = pod(), 365 * 86400
    await tokens.get(web, seconds=year)
    api.clock = 86400
    assert await tokens.get(web, seconds=year) == "token-1"
    api.clock += 1
    assert await tokens.get(web, seconds=year) == "token-2"


@pytest.mark.parametrize(
    ("other", "audiences", "seconds", "account_uid"),
    [
        (pod(uid="another"), (), 3600, ""),
        (pod(account="builder"), (), 3600, ""),
        (pod(), ("vault",), 3600, ""),
        (pod(), (), 7200, ""),
        (pod(), (), 3600, "sa-2"),
    ],
)
async def test_token_cache_different_key_requests_separate_token(
    tokens: TokenCache, other: Pod, audiences: tuple[str, ...], seconds: int, account_uid: str
) -> None:
    assert await tokens.get(pod()) == "token-1"
    kept = await tokens.get(other, audiences=audiences, seconds=seconds, account_uid=account_uid)
    assert kept == "token-2"
    assert await tokens.get(pod()) == "token-1"


async def test_token_cache_refresh_fails_uses_token_until_expiry(api: ObjectApi, tokens: TokenCache) -> None:
    web = pod()
    await tokens.get(web)
    api.broken = AWAY
    api.clock = 0.9 * HOUR
    assert await tokens.get(web) == "token-1"
    api.clock = HOUR + 1
    with pytest.raises(
        ObjectError, match=r"^token of service account shop/default expired and refresh failed: .*refused$"
    ):
        await tokens.get(web)
    api.broken = None
    assert await tokens.get(web) == "token-2"


async def test_token_cache_service_account_missing_raises_object_error(
    api: ObjectApi, tokens: TokenCache
) -> None:
    api.broken = NotFound(404, "NotFound", 'serviceaccounts "default" not found')
    with pytest.raises(ObjectError, match=r'^failed to fetch token: serviceaccounts "default" not found$'):
        await tokens.get(pod())


@pytest.mark.looptime
async def test_token_cache_concurrent_requests_share_one_call(api: ObjectApi, tokens: TokenCache) -> None:
    api.slow = 1.0
    first = asyncio.ensure_future(tokens.get(pod()))
    others = [asyncio.ensure_future(tokens.get(pod())) for _ in range(20)]
    await asyncio.sleep(0.5)
    first.cancel()
    assert set(await asyncio.gather(*others)) == {"token-1"}
    # The one who asked was cancelled; the next one asked again, for all.
    assert api.count("create") == 2


async def test_token_cache_forget_drops_tokens_of_pod(api: ObjectApi, tokens: TokenCache) -> None:
    web, other = pod(), pod("other")
    await tokens.get(web)
    await tokens.get(web, audiences=("vault",))
    await tokens.get(other)
    tokens.forget(web.uid)
    assert await tokens.get(other) == "token-3"
    assert await tokens.get(web) == "token-4"


async def test_token_cache_drop_expired_removes_expired_tokens(api: ObjectApi, tokens: TokenCache) -> None:
    await tokens.get(pod(), seconds=600)
    await tokens.get(pod(), seconds=7200)
    api.clock = HOUR
    tokens.drop_expired()
    api.broken = AWAY
    assert await tokens.get(pod(), seconds=7200) == "token-2"
    # Had it been kept, its end would be the reason.
    with pytest.raises(ObjectError, match=r"^failed to fetch token"):
        await tokens.get(pod(), seconds=600)


UNSEEN = NotFound(404, "NotFound", 'pod "web" not found', details=StatusDetails(name="web", kind="pod"))
STRANGE = Forbidden(403, "Forbidden", "no relationship found between node 'one' and this object")


@pytest.mark.looptime
@pytest.mark.parametrize("refusal", [UNSEEN, STRANGE])
async def test_token_cache_pod_not_yet_known_to_server_is_retried(
    api: ObjectApi, tokens: TokenCache, refusal: KubeError
) -> None:
    api.refusals = [refusal, refusal]
    assert await tokens.get(pod()) == "token-1"
    assert api.count("create") == 3
    # One that never sees it is not asked for ever.
    api.broken = refusal
    with pytest.raises(ObjectError, match="failed to fetch token: "):
        await tokens.get(pod("other"))
    assert api.count("create") == 3 + 1 + len(RETRY_DELAYS_SECONDS)


async def test_token_cache_service_account_missing_is_not_retried(api: ObjectApi, tokens: TokenCache) -> None:
    missing = 'serviceaccounts "default" not found'
    api.broken = NotFound(404, "NotFound", missing, details=StatusDetails("default", kind="serviceaccounts"))
    with pytest.raises(ObjectError, match=missing):
        await tokens.get(pod())
    assert api.count("create") == 1
