"""The page in Chromium, on a real node with running, failing and hostile pods."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import urllib.request
from collections.abc import AsyncIterator, Iterator

import pytest

from pykubelet.standalone.daemon import find_daemons
from tests.support.browser import AXE, CHROMIUM, Browser, browsing, serious_findings
from tests.support.node import NAME, Node, kubelet_node, running
from tests.support.page_pods import container_of, exec_probe, pod, resources
from tests.support.ports import free_port
from tests.support.runtime import RunningRuntime

HOSTILE = "<script>alert('pod')</script><img src=x onerror=alert(1)>\"'"
_WRITES = (
    "head -c 1000000 /dev/zero | tr '\\0' a; echo; printf '%s\\n' \"<script>alert('log')</script>\"; "
    "printf '\\033[31mred\\033[0m plain\\n'; echo the end; sleep 3600"
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
    assert "red plain" in log
    assert "<script>alert('log')</script>" in log
    assert "a" * 100 in log
    assert "\x1b" not in log
    assert len(log) < 20_000
    await tab.wait_for_selector(".chart .none >> text=No CPU limit")
    text = await tab.inner_text("main")
    assert HOSTILE in text
    assert "s3cret" not in await tab.content()
    assert await tab.locator("figure .legend").first.inner_text() != ""
    assert await tab.locator("main script, main img").count() == 0
    broken = await browser.open(f"/pod/default/broken-{NAME}")
    assert "CrashLoopBackOff" in await broken.inner_text("#chain .failed")
    assert HOSTILE in await broken.inner_text("#chain .log")
    assert f"logs default/broken-{NAME} -c main -p" in await broken.inner_text("#chain .why .command")
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


async def test_changes_while_text_is_selected_are_shown_after_the_selection(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    tab, other = await browser.open("/"), await browser.open("/")
    select = "getSelection().selectAllChildren(document.querySelector('#summary .sentence'))"
    await tab.evaluate(select)
    name = node.write(pod("selected", container={"image": f"127.0.0.1:1/{'y' * 20}:v1"}))
    await other.wait_for_selector(f"#attention >> text={name}", timeout=60_000)
    # Messages of one round reach all pages; the next one is after it.
    sent = await tab.evaluate(
        "new Promise(done => new EventSource('/events?view=node')"
        ".addEventListener('update', event => done(event.data)))"
    )
    assert name in sent
    assert name not in await tab.inner_text("#attention")
    # Immediately, not with the next change of the section.
    shown = await tab.evaluate(
        "new Promise(done => { document.addEventListener('selectionchange', "
        "() => done(document.querySelector('#attention').innerText), {once: true}); "
        "getSelection().removeAllRanges(); })"
    )
    assert name in shown
    node.remove(name)
    await tab.wait_for_selector(f"#attention >> text={name}", state="detached", timeout=60_000)


async def test_chart_of_many_containers_shows_pod_and_three_largest_and_number_of_others(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    many = pod("many")
    many["spec"]["containers"] += [container_of(f"side-{number}", "sleep 3600") for number in range(4)]
    name = node.write(many)
    node.wait_ready(name)
    tab = await browser.open(f"/pod/default/{name}")
    # A chart is drawn again when a container has its first measurement.
    legends = tab.locator(".chart:has-text('Memory') .legend:has-text('and 2 more')")
    legend = await legends.inner_text(timeout=60_000)
    assert legend.count("KiB") + legend.count("MiB") == 4
    node.remove(name)


async def test_images_view_shows_image_of_running_pod_in_use(browser: Browser) -> None:
    tab = await browser.open("/images")
    row = await tab.inner_text("#images tr:has-text('busybox')")
    assert "in use" in row
    assert "pinned" in row


async def test_pod_that_leaves_while_its_page_is_open_has_a_banner(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    name = node.write(pod("leaves"))
    node.wait_ready(name)
    tab = await browser.open(f"/pod/default/{name}")
    assert await tab.locator(".banner").count() == 0
    node.remove(name)
    await tab.wait_for_selector(".banner >> text=This pod is gone", timeout=60_000)
    assert await tab.locator("main.gone #title").is_visible()


async def test_runtime_that_hangs_is_named_on_every_open_page_until_it_responds(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    tab = await browser.open("/")
    (daemon,) = find_daemons(node.instance)
    os.kill(daemon.pid, signal.SIGSTOP)
    try:
        await tab.wait_for_selector("#summary .bad >> text=container runtime", timeout=90_000)
        images = await browser.open("/images")
        assert "could not be listed now" in await images.inner_text("#disk")
        assert "busybox" in await images.inner_text("#images")
    finally:
        os.kill(daemon.pid, signal.SIGCONT)
    await tab.wait_for_selector("#summary:not(:has-text('container runtime'))", timeout=60_000)
    await images.wait_for_selector("#disk .problem", state="detached", timeout=60_000)


async def test_restart_of_kubelet_under_open_page_reconnects(
    page_url: tuple[Node, str], browser: Browser
) -> None:
    node, _ = page_url
    tab = await browser.open(f"/pod/default/web-{NAME}")
    await tab.evaluate("window.isSamePage = true")
    # As a container of the previous kubelet process that does not exist any more.
    stale = "<section id='stale' data-live></section>"
    await tab.evaluate(f'document.getElementById("content").insertAdjacentHTML("beforeend", "{stale}")')
    node.kill()
    await tab.wait_for_selector("#live.lost", timeout=30_000)
    # In this thread: the kubelet is terminated when the thread that started it ends.
    node.start()
    await tab.wait_for_selector("#live.on", timeout=60_000)
    await tab.wait_for_selector("#title .badge.ok", timeout=60_000)
    await tab.wait_for_selector("#stale", state="detached", timeout=60_000)
    assert await tab.evaluate("window.isSamePage") is True


async def test_fifty_clients_are_all_updated(page_url: tuple[Node, str], browser: Browser) -> None:
    """Verify four tabs and 46 streams: a browser opens six connections to a host at most."""
    _, url = page_url
    tabs = [await browser.open("/") for _ in range(4)]
    streams = [
        await asyncio.to_thread(urllib.request.urlopen, f"{url}/events?view=pods", timeout=30)
        for _ in range(46)
    ]
    try:
        for stream in streams:
            text = b""
            while text.count(b"event: update") < 2:
                line = await asyncio.to_thread(stream.readline)
                assert line
                text += line
        for tab in tabs:
            await tab.evaluate("document.querySelector('#summary').dataset.old = '1'")
        for tab in tabs:
            await tab.wait_for_selector("#summary:not([data-old])", timeout=30_000)
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
