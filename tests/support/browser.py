"""A real Chromium for the tests of the console, if there is one."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser, Page, expect, sync_playwright

TIMEOUT_MS = 120_000
"""Beside other tests on a slow machine an answer takes its time; what fails, fails for another reason."""
expect.set_options(timeout=TIMEOUT_MS)
NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
APPLICATIONS = (
    "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome",
    "/Applications/Chromium.app/Contents/MacOS/Chromium",
)


def _found() -> str | None:
    named = os.environ.get("CHROMIUM")
    candidates = [named] if named else [*map(shutil.which, NAMES), *filter(os.path.exists, APPLICATIONS)]
    return next((path for path in candidates if path), None)


BROWSER = _found()
"""The program; None where there is none. `CHROMIUM` names another one."""


NOTING_TOASTS = """addEventListener("DOMContentLoaded", () => {
    const place = document.getElementById("toasts");
    window.__said = [];
    const note = ({ addedNodes }) => addedNodes.forEach((one) => window.__said.push(one.textContent));
    if (place) new MutationObserver((changes) => changes.forEach(note)).observe(place, { childList: true });
})"""
"""A toast goes after some seconds, in which a slow machine may not look."""


def expect_toast(page: Page, text: str) -> None:
    """Waits until the page has said so since it was loaded, or has said it before; needs `NOTING_TOASTS`."""
    page.wait_for_function("(text) => window.__said?.some((one) => one.includes(text))", arg=text)


@contextmanager
def browser() -> Iterator[Browser]:
    """Starts it without a window, and ends it."""
    # What is preloaded for MLX is there already, and ends the browser.
    preloaded = os.environ.pop("LD_PRELOAD", None)
    try:
        with sync_playwright() as playwright:
            # A container's root has no sandbox, and the pages are our own.
            chromium = playwright.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
            yield chromium
            chromium.close()
    finally:
        if preloaded is not None:
            os.environ["LD_PRELOAD"] = preloaded
