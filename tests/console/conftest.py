"""One browser for a file of tests, and one context for most: a start takes a second and more.

While Playwright runs, no other event loop may run in its thread: it ends with the file.
"""

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext

from tests.support.browser import NOTING_TOASTS, TIMEOUT_MS, browser


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found


@pytest.fixture(scope="module")
def _shared_context(chromium: Browser) -> BrowserContext:
    """A new context for each test would take half a second of each."""
    context = chromium.new_context(viewport={"width": 1200, "height": 800})
    context.set_default_timeout(TIMEOUT_MS)
    context.add_init_script(NOTING_TOASTS)
    context.new_page()
    return context


@pytest.fixture
def context(_shared_context: BrowserContext) -> Iterator[BrowserContext]:
    """A context that has kept nothing; scripts and clocks are for its pages, since it stays."""
    yield _shared_context
    first, *pages = _shared_context.pages
    origins = {urlsplit(page.url)._replace(path="", query="", fragment="").geturl() for page in pages}
    for page in pages:
        page.close()
    session = _shared_context.new_cdp_session(first)
    for origin in origins:
        session.send("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
    session.detach()
