import asyncio
import json
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pykubelet.apiserver.client import NODES
from pykubelet.apiserver.credentials import (
    CredentialSource,
    PluginCredentials,
    PluginError,
    impersonation_headers,
    read_exec_credential,
    run_plugin,
)
from pykubelet.apiserver.errors import NoCredentials, Unauthorized
from pykubelet.apiserver.metrics import RestMetrics
from pykubelet.apiserver.rest_config import ExecPlugin, Impersonation, RestConfig
from tests.support.api_client import Opener
from tests.support.api_server import Server, answer, refuse
from tests.support.certs import Authority, Pair
from tests.support.waiting import until

V1 = "client.authentication.k8s.io/v1"
NODE = {"metadata": {"name": "one"}}
Scripts = Callable[[str, str], Path]


def credential(api_version: str = V1, **status: Any) -> str:
    return json.dumps({"kind": "ExecCredential", "apiVersion": api_version, "status": status})


def says(document: str) -> str:
    return f"cat <<'END'\n{document}\nEND"


# Tokens in files.


async def test_token_file_replaced_is_used_by_next_request(
    server: Server, authority: Authority, tmp_path: Path, opened: Opener
) -> None:
    server.default = answer(NODE)
    token = tmp_path / "token"
    token.write_text(" first\n")
    client = opened(RestConfig(server.url, ca=authority.certificate, token_file=token))
    await client.get(NODES, "one")
    token.write_text("second")
    await client.get(NODES, "one")
    token.unlink()
    await client.get(NODES, "one")
    assert [s.header("Authorization") for s in server.seen] == [
        "Bearer first",
        "Bearer second",
        "Bearer second",
    ]
    # Another token is no reason for another connection.
    assert len({seen.peer for seen in server.seen}) == 1


async def test_token_file_same_mtime_is_reread_after_401(
    server: Server, authority: Authority, tmp_path: Path, opened: Opener
) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    stat = token.stat()
    client = opened(RestConfig(server.url, ca=authority.certificate, token_file=token))
    server.say(answer(NODE), refuse(401, "Unauthorized"), answer(NODE))
    await client.get(NODES, "one")
    token.write_text("later")
    os.utime(token, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    await client.get(NODES, "one")
    assert [s.header("Authorization") for s in server.seen] == ["Bearer first"] * 2 + ["Bearer later"]
    server.default = refuse(401, "Unauthorized", "who are you")
    with pytest.raises(Unauthorized, match="who are you"):
        await client.get(NODES, "one")
    assert len(server.seen) == 4


async def test_token_file_precedes_static_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    source = CredentialSource(RestConfig("https://x", insecure=True, token="static", token_file=token))
    assert (await source.current()).headers == (("Authorization", "Bearer static"),)
    token.write_text("fresh")
    assert (await source.current()).headers == (("Authorization", "Bearer fresh"),)


@pytest.mark.looptime
async def test_token_file_is_reread_every_minute(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("first")
    stat = token.stat()
    source = CredentialSource(RestConfig("https://x", insecure=True, token_file=token))
    first = await source.current()
    assert await source.current() is first
    token.write_text("later")
    os.utime(token, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert await source.current() is first
    await asyncio.sleep(60)
    assert (await source.current()).headers == (("Authorization", "Bearer later"),)


@pytest.mark.parametrize(
    ("contents", "words"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"\xff", "it is not text"),
        (b"a\nb", "characters that a token"),
    ],
)
async def test_token_file_invalid_content_raises(tmp_path: Path, contents: bytes, words: str) -> None:
    token = tmp_path / "token"
    token.write_bytes(contents)
    with pytest.raises(NoCredentials, match=words):
        await CredentialSource(RestConfig("https://x", insecure=True, token_file=token)).current()


async def test_basic_auth_and_impersonation_headers_are_sent(
    server: Server, authority: Authority, opened: Opener
) -> None:
    server.default = answer(NODE)
    who = Impersonation("jané 李", "7", ("a", "b"), {"Re/ason%": ("x", "y")})
    access = RestConfig(
        server.url, ca=authority.certificate, username="me", password="pässword", impersonate=who
    )
    client = opened(access)
    await client.get(NODES, "one")
    await client.patch(NODES, "one", {})
    assert server.seen[0].header("Impersonate-User") == server.seen[1].header("Impersonate-User")
    headers = server.seen[0].headers
    assert ("Authorization", "Basic bWU6cMOkc3N3b3Jk") in headers
    assert [pair for pair in headers if pair[0].startswith("Impersonate")] == list(impersonation_headers(who))
    assert impersonation_headers(who) == (
        ("Impersonate-User", "jané 李"),
        ("Impersonate-Uid", "7"),
        ("Impersonate-Group", "a"),
        ("Impersonate-Group", "b"),
        ("Impersonate-Extra-Re%2Fason%25", "x"),
        ("Impersonate-Extra-Re%2Fason%25", "y"),
    )


# Credentials from programs.


async def test_exec_plugin_token_is_cached_and_renewed_after_401(
    server: Server, authority: Authority, scripts: Scripts, opened: Opener
) -> None:
    server.default = answer(NODE)
    script = scripts("plugin", 'echo run >> "$COUNT"\n' + says(credential(token="from-plugin")))
    count = script.with_name("count")
    plugin = ExecPlugin(str(script), V1, env={"COUNT": str(count)})
    client = opened(RestConfig(server.url, ca=authority.certificate, plugin=plugin))
    await asyncio.gather(*(client.get(NODES, "one") for _ in range(5)))
    assert {s.header("Authorization") for s in server.seen} == {"Bearer from-plugin"}
    assert count.read_text() == "run\n"
    # Refused credentials are asked for anew, once.
    server.default = refuse(401, "Unauthorized")
    with pytest.raises(Unauthorized):
        await client.get(NODES, "one")
    assert count.read_text() == "run\n" * 2


async def test_exec_plugin_receives_exec_info_args_and_env(scripts: Scripts, tmp_path: Path) -> None:
    script = scripts(
        "plugin",
        f'cd {tmp_path}; printf %s "$KUBERNETES_EXEC_INFO" > info; printf "%s|" "$@" "$A" "$PATH" > rest\n'
        + says(credential(token="x")),
    )
    plugin = ExecPlugin(
        str(script), V1, ("a b", "$c"), {"A": "mine"}, provide_cluster_info=True, cluster_config={"aud": "x"}
    )
    access = RestConfig("https://api:6443", tls_server_name="n", proxy="http://p:1")
    await run_plugin(plugin, access, b"PEM", environ={"PATH": "/usr/bin:/bin", "A": "theirs"})
    assert (tmp_path / "rest").read_text() == "a b|$c|mine|/usr/bin:/bin|"
    assert json.loads((tmp_path / "info").read_text()) == {
        "kind": "ExecCredential",
        "apiVersion": V1,
        "spec": {
            "interactive": False,
            "cluster": {
                "server": "https://api:6443",
                "tls-server-name": "n",
                "certificate-authority-data": "UEVN",
                "proxy-url": "http://p:1",
                "config": {"aud": "x"},
            },
        },
    }


async def test_exec_plugin_certificate_expired_is_rotated(
    server: Server, authority: Authority, node_pair: Pair, scripts: Scripts, tmp_path: Path, opened: Opener
) -> None:
    server.default = answer(NODE)
    renewed = authority.sign("/CN=system:node:renewed", ends=600)

    def document(pair: Pair, expires: float) -> str:
        return credential(
            clientCertificateData=pair.certificate.read_text(),
            clientKeyData=pair.key.read_text(),
            expirationTimestamp=datetime.fromtimestamp(expires, UTC).isoformat(),
        )

    said = tmp_path / "said.json"
    said.write_text(document(node_pair, time.time() + 100))
    plugin = ExecPlugin(str(scripts("plugin", f"cat {said}")), V1)
    registry = CollectorRegistry()
    ahead = [0.0]
    client = opened(
        RestConfig(server.url, ca=authority.certificate, plugin=plugin),
        metrics=RestMetrics(registry),
        clock=lambda: time.time() + ahead[0],
    )
    await client.get(NODES, "one")
    said.write_text(document(renewed, time.time() + 1000))
    await client.get(NODES, "one")
    ahead[0] = 101
    await client.get(NODES, "one")
    assert [s.subject for s in server.seen] == ["system:node:one"] * 2 + ["system:node:renewed"]
    ttl = registry.get_sample_value("rest_client_exec_plugin_ttl_seconds")
    assert ttl == pytest.approx(600 - 101, abs=30)
    assert registry.get_sample_value("rest_client_exec_plugin_certificate_rotation_age_count") == 1


@pytest.mark.looptime
async def test_exec_plugin_wrong_clock_is_not_run_for_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, runs = [7200.0], 0

    async def ask(*_: object, **__: object) -> PluginCredentials:
        nonlocal runs
        runs += 1
        return PluginCredentials(f"token-{runs}", expires=datetime.fromtimestamp(900, UTC))

    monkeypatch.setattr("pykubelet.apiserver.credentials.run_plugin", ask)
    access = RestConfig("https://x", insecure=True, plugin=ExecPlugin("plugin", V1))
    source = CredentialSource(access, clock=lambda: now[0])
    first = await source.current()
    for _ in range(10):
        assert await source.current() is first
    # Who refuses it has the last word.
    assert await source.renewed(first)
    assert runs == 2
    await asyncio.sleep(60)
    await source.current()
    assert runs == 3
    # When the clock is right again, what the answer says counts.
    now[0] = 0.0
    await asyncio.sleep(600)
    await source.current()
    assert runs == 3
    now[0] = 901.0
    await source.current()
    assert runs == 4


async def test_exec_plugin_renewal_fails_logs_once(
    server: Server, authority: Authority, scripts: Scripts, opened: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    script = scripts("plugin", says(credential(token="old")))
    client = opened(RestConfig(server.url, ca=authority.certificate, plugin=ExecPlugin(str(script), V1)))
    server.default = refuse(401, "Unauthorized", "who are you")
    with pytest.raises(Unauthorized):
        await client.get(NODES, "one")
    script.write_text("#!/bin/sh\necho no network >&2; exit 3\n")
    source = client.transport.credentials
    for _ in range(5):
        # As if it had been renewed in between, and refused again.
        source._stale, source._failure = False, None
        with pytest.raises(Unauthorized):
            await client.get(NODES, "one")
    told = [record for record in caplog.records if "renew rejected credentials" in record.getMessage()]
    assert len(told) == 1


async def test_exec_plugin_with_static_token_is_not_run(tmp_path: Path) -> None:
    plugin = ExecPlugin("/does/not/exist", V1)
    source = CredentialSource(RestConfig("https://x", insecure=True, token="t", plugin=plugin))
    assert (await source.current()).headers == (("Authorization", "Bearer t"),)
    plain = CredentialSource(RestConfig("http://x", plugin=plugin))
    assert (await plain.current()).headers == ()


async def test_exec_plugin_failing_is_not_run_for_every_request(
    server: Server,
    authority: Authority,
    scripts: Scripts,
    tmp_path: Path,
    opened: Opener,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Three requests may take longer than the pause is.
    monkeypatch.setattr("pykubelet.apiserver.credentials.PLUGIN_RETRY_SECONDS", 300)
    count = tmp_path / "count"
    script = scripts("plugin", f"echo run >> {count}; echo no network >&2; exit 3")
    client = opened(RestConfig(server.url, ca=authority.certificate, plugin=ExecPlugin(str(script), V1)))
    for _ in range(3):
        with pytest.raises(NoCredentials, match=r"plugin failed with status 3: no network"):
            await client.get(NODES, "one")
    assert count.read_text() == "run\n"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("exit 7", "failed with status 7: it gave no reason"),
        ("printf 'a\\nb\\033[31mc' >&2; exit 1", r"status 1: a b \[31mc"),
        ("echo '{'", "not a valid ExecCredential"),
        ("echo s3cret", "not a valid ExecCredential"),
        ("head -c 2000000 /dev/zero", "longer than 1024 KiB"),
        ("yes", "longer than 1024 KiB"),
        ("sleep 60", r"did not answer within 0.5 s"),
        (says(credential()), "neither a token nor a certificate"),
        (says(credential(clientKeyData="s3cret")), "a certificate or a key, but not both"),
        (says(credential("client.authentication.k8s.io/v1beta1", token="s3cret")), "the kubeconfig wants"),
        (says(json.dumps({"kind": "Secret", "apiVersion": V1})), "is a 'Secret'"),
        (says(json.dumps({"kind": "ExecCredential", "apiVersion": V1})), "has no status"),
    ],
)
async def test_run_plugin_bad_output_or_exit_raises_without_secret(
    scripts: Scripts, monkeypatch: pytest.MonkeyPatch, body: str, words: str
) -> None:
    if "sleep" in body:
        monkeypatch.setattr("pykubelet.apiserver.credentials.TIMEOUT_SECONDS", 0.5)
    begin = time.monotonic()
    with pytest.raises(PluginError, match=words) as caught:
        await run_plugin(ExecPlugin(str(scripts("plugin", body)), V1), RestConfig("https://x"), None)
    assert "s3cret" not in str(caught.value)
    assert "\n" not in str(caught.value)
    assert time.monotonic() - begin < 30


async def test_run_plugin_missing_binary_raises_with_install_hint(tmp_path: Path) -> None:
    hint = "Install it:\n  brew install \x1b[1maws"
    with pytest.raises(PluginError, match=r"no-such-plugin was not found: Install it: brew install \[1maws"):
        await run_plugin(ExecPlugin("no-such-plugin", V1, install_hint=hint), RestConfig("https://x"), None)
    with pytest.raises(PluginError, match=r"was not found: install it"):
        await run_plugin(ExecPlugin("no-such-plugin", V1), RestConfig("https://x"), None)
    plain = tmp_path / "plain"
    plain.touch()
    with pytest.raises(PluginError, match="could not be started: Permission denied"):
        await run_plugin(ExecPlugin(str(plain), V1), RestConfig("https://x"), None)


async def test_run_plugin_cancelled_kills_process_and_children(scripts: Scripts, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = scripts("plugin", f"sleep 300 & echo $! > {pids}; echo $$ >> {pids}; wait")
    task = asyncio.ensure_future(run_plugin(ExecPlugin(str(script), V1), RestConfig("https://x"), None))
    await until(lambda: pids.exists() and pids.read_text().count("\n") == 2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for pid in pids.read_text().split():
        for _ in range(2000):
            try:
                if "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
                    break
            except (FileNotFoundError, ProcessLookupError):
                break
            await asyncio.sleep(0.01)
        else:
            pytest.fail("a process of the plugin is left")


def test_read_exec_credential_expiry_without_zone_is_utc() -> None:
    read = read_exec_credential(credential(token="x", expirationTimestamp="2026-01-01T00:00:00").encode(), V1)
    assert read.expires == datetime(2026, 1, 1, tzinfo=UTC)
    assert "x" not in repr(read).replace("expires", "")
