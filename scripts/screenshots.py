"""Pictures of every view of the console, in light and dark, wide, narrow and small, with traffic of its own.

    python -m scripts.screenshots FOLDER          # starts `serve demo` on a free port, and stops it

`chat-small.png` is the picture of the README, `docs/console.png`.
Needs `playwright` and a Chromium, see `tests.support.browser.py`.
"""

import argparse
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import httpx
from playwright.sync_api import Page

from server.api.app import create_pool_app
from server.app.config import ServerConfig
from server.app.service import open_service
from server.pool.pool import ModelPool
from tests.support.browser import BROWSER, browser
from tests.support.live_server import running

SIZES = {"wide": (1280, 860), "narrow": (400, 800)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
RULES = "You help in a small library. You know the shelves and the rules, and you answer in one short sentence. "
READERS = {
    "ada": ("My name is Ada and I live in Paris.", "What is my name?", "Where do I live?"),
    "bob": ("My name is Bob and I live in Rome.", "What is my name?"),
    "eve": ("What is the weather like?", "And tomorrow?"),
}
QUESTIONS = ("My name is Ada and I live in Paris.", "What is my name?", "Where do I live?")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serves the demo model with a disk tier in `folder`; gives the address."""
    config = ServerConfig(models=("demo",), cache_disk_bytes=1 << 28, cache_dir=str(folder), slots=4)
    service = open_service(config)
    service.engine.start()
    try:
        with running(create_pool_app(ModelPool.of(service.opened), config)) as address:
            yield address
    finally:
        service.engine.stop()


def converse(address: str) -> None:
    """Has several readers talk to the same assistant."""
    for name, questions in READERS.items():
        messages = [{"role": "system", "content": RULES * 4}]
        for text in questions:
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, "session_id": name, "max_tokens": 24, "temperature": 0}
            answer = httpx.post(f"{address}/v1/chat/completions", json=body, timeout=60).json()
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})


def prepare(page: Page, address: str) -> None:
    """Clicks through the first steps and a chat, so that there is something to see."""
    converse(address)
    page.goto(address)
    page.goto(f"{address}/#/chat/new")
    field = page.get_by_label("Message", exact=True)
    for text in QUESTIONS:
        field.fill(text)
        field.press("Enter")
        page.get_by_role("button", name="Stop").wait_for(state="detached")


def take(page: Page, address: str, folder: Path, suffix: str) -> None:
    """Saves a picture of each view."""
    for view in ("now", "tree", "sessions", "sessions/ada", "requests", "chat", "models"):
        page.goto(f"{address}/#/{view}")
        page.wait_for_timeout(900)
        if view == "tree":
            page.locator("canvas").focus()
            for key in ("ArrowDown", "ArrowDown"):
                page.keyboard.press(key)
            page.wait_for_timeout(700)
        page.screenshot(path=folder / f"{view.replace('/', '-')}-{suffix}.png")


def main() -> int:
    """Takes the pictures; returns an exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    if BROWSER is None:
        print("no Chromium was found", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as state, served(Path(state)) as address, browser() as chromium:
        context = chromium.new_context()
        page = context.new_page()
        prepare(page, address)
        for name, (width, height) in SIZES.items():
            page.set_viewport_size({"width": width, "height": height})
            for scheme in SCHEMES:
                page.emulate_media(color_scheme=scheme)
                take(page, address, folder, f"{name}-{scheme}")
        page.set_viewport_size({"width": 1000, "height": 640})
        page.emulate_media(color_scheme="light")
        take(page, address, folder, "small")
    return 0


if __name__ == "__main__":
    sys.exit(main())
