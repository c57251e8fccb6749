"""A headless Chromium that shows the page, and reports every script error and blocked request."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from playwright.async_api import BrowserContext, Page, Request, Route, async_playwright

CHROMIUM = Path("/usr/bin/chromium")
AXE = Path(__file__).parents[2] / ".tools" / "axe-4.14.0.min.js"
_ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@dataclass
class Browser:
    """A browser profile of its own."""

    context: BrowserContext
    url: str
    problems: list[str] = field(default_factory=list)
    """Errors of scripts, violations of the content security policy, and requests to other hosts."""

    async def open(self, path: str, *, width: int = 1280, theme: Literal["light", "dark"] = "light") -> Page:
        """Open a path of the page in a new tab, and wait until it is updated live."""
        tab = await self.context.new_page()
        tab.on("pageerror", lambda err: self.problems.append(f"{path}: {err}"))
        tab.on("console", lambda message: self._check_message(path, message.type, message.text))
        tab.on("dialog", lambda dialog: self.problems.append(f"{path}: a script ran: {dialog.message}"))
        await tab.set_viewport_size({"width": width, "height": 800})
        await tab.emulate_media(color_scheme=theme)
        await tab.goto(f"{self.url}{path}", wait_until="load")
        await tab.wait_for_selector("#live.on", timeout=30_000)
        return tab

    def _check_message(self, path: str, kind: str, text: str) -> None:
        # A lost connection is reported, too; that is no defect of the page.
        if "Content Security Policy" in text or (kind == "error" and "Failed to load resource" not in text):
            self.problems.append(f"{path}: {text}")


@contextlib.asynccontextmanager
async def browsing(url: str) -> AsyncIterator[Browser]:
    """Run a browser without access to any other host while the context is open."""
    with tempfile.TemporaryDirectory(prefix="pyk-chromium-") as profile:
        async with async_playwright() as playwright:
            context = await playwright.chromium.launch_persistent_context(
                profile,
                executable_path=CHROMIUM,
                headless=True,
                args=list(_ARGUMENTS),
                chromium_sandbox=False,
            )
            browser = Browser(context, url)

            async def refuse(route: Route, request: Request) -> None:
                browser.problems.append(f"request to {request.url}")
                await route.abort()

            await context.route(lambda asked: not asked.startswith(url), refuse)
            try:
                yield browser
            finally:
                await context.close()


async def serious_findings(tab: Page) -> list[dict[str, Any]]:
    """Return the serious and critical findings of axe-core on the page as it is shown now.

    The script is evaluated by the browser's debugger, so the content security policy does not block it.
    """
    await tab.evaluate(AXE.read_text())
    found = await tab.evaluate(
        "axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})"
    )
    return [
        {"id": each["id"], "nodes": [node["html"][:150] for node in each["nodes"][:3]]}
        for each in found["violations"]
        if each["impact"] in ("serious", "critical")
    ]
