"""The page in Chromium, on a real node with running, failing and hostile pods."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest

from tests.support.browser import AXE, CHROMIUM, Browser, browsing, serious_findings
from tests.support.node import NAME, Node, kubelet_node, running
from tests.support.page_pods import container_of, exec_probe, pod, resources
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime

HOSTILE = "<script>alert('pod')</script><img src=x onerror=alert(1)>\"'"
_WRITES = (
    "printf '%s\\n' \"<script>alert('log')</script>\"; printf '\\033[31mred\\033[0m plain\\n'; "
    "head -c 1000000 /dev/zero | tr '\\0' a; echo; echo the end; sleep 3600"
)
pytestmark = pytest.mark.timeout(240)
VIEWS = ("/", "/pods", f"/pod/default/web-{NAME}", f"/pod/default/broken-{NAME}", "/images", "/agent")


@pytest.fixture(scope="module")
def page_url(runtime: RunningRuntime) -> Iterator[tuple[Node, str]]:
    """A node with its page, and a few pods."""
    for needed in (CHROMIUM, AXE):
        assert needed.exists(), f"{needed} does not exist: run scripts/setup --test"
    port = free_port()
    with running(kubelet_node(runtime, flags=[f"--page-port={port}"])) as node:
        web = pod("web", "while true; do echo GET /; sleep 1; done", container=resources("100m", "32Mi"))
        hostile = pod("hostile", _WRITES, metadata={"annotations": {"note": HOSTILE}, "labels": {"app": "x"}})
        hostile["spec"]["containers"][0]["env"] = [{"name": "PASSWORD", "value": "s3cret"}]
        broken = pod(
            "broken", f"echo {json.dumps(HOSTILE)}; exit 1", initContainers=[container_of("setup", "true")]
        )
        typo = pod("typo", container={"image": f"127.0.0.1:1/{'x' * 80}:v2"})
        for document in (web, hostile, broken, typo):
            node.write(document)
        node.wait_ready(f"web-{NAME}")
        node.wait_ready(f"hostile-{NAME}")
        node.wait_event(f"broken-{NAME}", "BackOff")
        node.wait_event(f"typo-{NAME}", "Failed")
        yield node, f"http://127.0.0.1:{port}"
        node.clear()


@pytest.fixture
async def browser(page_url: tuple[Node, str]) -> AsyncIterator[Browser]:
    """A browser without problems at the end of the test."""
    async with browsing(page_url[1]) as started:
        yield started
        assert started.problems == []


async def test_views_without_serious_findings_in_both_themes_and_at_320_pixels(browser: Browser) -> None:
    for path in VIEWS:
        tab = await browser.open(path)
        for theme in ("light", "dark"):
            await tab.emulate_media(color_scheme=theme)
            assert await serious_findings(tab) == [], f"{path} in the {theme} theme"
        await tab.set_viewport_size({"width": 320, "height": 700})
        # Every part is laid out again before the width is read.
        widths = await tab.evaluate(
            "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => "
            "done([document.documentElement.scrollWidth, innerWidth]))))"
        )
        assert widths == [320, 320], path
        await tab.close()


async def test_hostile_log_and_annotation_are_shown_and_never_run(browser: Browser) -> None:
    tab = await browser.open(f"/pod/default/hostile-{NAME}")
    log = await tab.inner_text("#log-main")
    assert "the end" in log
    assert "red plain" in log or "a" * 100 in log
    assert "\x1b" not in log
    assert len(log) < 20_000
    text = await tab.inner_text("main")
    assert HOSTILE in text
    assert "s3cret" not in await tab.content()
    assert await tab.locator("main script, main img").count() == 0
    broken = await browser.open(f"/pod/default/broken-{NAME}")
    assert "CrashLoopBackOff" in await broken.inner_text("#chain .failed")
    assert await broken.locator("main script, main img").count() == 0


async def test_pod_that_fails_while_page_is_open_is_shown_without_reload(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    tab = await browser.open("/")
    await tab.evaluate("window.isSamePage = true")
    probe = {"readinessProbe": exec_probe("test ! -e /tmp/bad")}
    name = node.write(pod("sudden", container=probe))
    node.wait_ready(name)
    node.shell(name, "touch /tmp/bad")
    await tab.wait_for_selector(f"#attention >> text={name}", timeout=60_000)
    assert "Unhealthy" in await tab.inner_text(f"#attention tr:has-text('{name}')")
    assert "need attention" in await tab.inner_text("#summary")
    node.remove(name)
    await tab.wait_for_selector(f"#attention >> text={name}", state="detached", timeout=60_000)
    assert await tab.evaluate("window.isSamePage") is True


async def test_restart_of_kubelet_under_open_page_reconnects(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    tab = await browser.open(f"/pod/default/web-{NAME}")
    await tab.evaluate("window.isSamePage = true")
    node.kill()
    await tab.wait_for_selector("#live.lost", timeout=30_000)
    # In this thread: the kubelet is terminated when the thread that started it ends.
    node.start()
    await tab.wait_for_selector("#live.on", timeout=60_000)
    await tab.wait_for_selector("#title .badge.ok", timeout=60_000)
    assert await tab.evaluate("window.isSamePage") is True


async def test_fifty_open_pages_are_all_updated(page_url: tuple[Node, str], browser: Browser) -> None:
    _, url = page_url
    tab = await browser.open("/")
    updated = await tab.evaluate(
        """async () => {
            const one = () => new Promise((done, fail) => {
                fetch('/events?view=pods').then(async (response) => {
                    const reader = response.body.getReader();
                    let text = '';
                    while (text.split('event: update').length < 3) {
                        const {value, done: ended} = await reader.read();
                        if (ended) { fail('ended'); return; }
                        text += new TextDecoder().decode(value);
                    }
                    await reader.cancel();
                    done(1);
                }, fail);
            });
            return one();
        }"""
    )
    assert updated == 1
    # A browser opens six connections to a host at most; the other pages are those of other operators.
    streams = [
        await asyncio.to_thread(urllib.request.urlopen, f"{url}/events?view=pods", timeout=30)
        for _ in range(49)
    ]
    try:
        for stream in streams:
            text = b""
            while text.count(b"event: update") < 2:
                line = await asyncio.to_thread(stream.readline)
                assert line
                text += line
        await tab.wait_for_selector("#live.on")
    finally:
        for stream in streams:
            stream.close()


async def test_keyboard_filter_theme_and_reading_without_javascript(browser: Browser) -> None:
    tab = await browser.open("/")
    await tab.keyboard.press("2")
    await tab.wait_for_url("**/pods")
    await tab.wait_for_selector("#live.on")
    await tab.keyboard.press("/")
    await tab.keyboard.type("web")
    assert await tab.locator("tr[data-text]:visible").count() == 1
    await tab.keyboard.press("Escape")
    await tab.keyboard.press("j")
    assert await tab.evaluate("document.activeElement.textContent") == f"web-{NAME}"
    await tab.keyboard.press("t")
    assert await tab.get_attribute("html", "data-theme") == "dark"
    await tab.keyboard.press("j")
    await tab.keyboard.press("Enter")
    await tab.wait_for_url("**/pod/default/**")
    assert await tab.get_attribute("html", "data-theme") == "dark"
    await tab.wait_for_selector(".uplot", timeout=30_000)

    plain = await browser.context.new_page()
    session = await browser.context.new_cdp_session(plain)
    await session.send("Emulation.setScriptExecutionDisabled", {"value": True})
    await plain.goto(f"{browser.url}/pods?q=broken&sort=name")
    assert await plain.locator("a.pod").all_inner_texts() == [f"broken-{NAME}"]
    assert await plain.locator(".filters button").is_visible()
