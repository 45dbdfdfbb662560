"""One browser for all tests of the console: a start takes a second and more."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.support.browser import browser


@pytest.fixture(scope="package")
def chromium() -> Iterator[Browser]:
    with browser() as found:
        yield found
