"""The files of the console: who gets them, and what their headers forbid."""

import fnmatch
import gzip
import tomllib
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from server.api.admin.console import POLICY, SOURCE
from server.app.config import ServerConfig
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

ROOT = Path(__file__).parents[3]
HTML = {"Accept": "text/html,application/xhtml+xml"}
MAX_BYTES = 240_000
MAX_LIBRARY_BYTES = 700_000
EVERY = {path.relative_to(SOURCE).as_posix(): path.read_bytes() for path in SOURCE.rglob("*") if path.is_file()}
LIBRARIES = {name: content for name, content in EVERY.items() if name.startswith("vendor/")}
FILES = {name: content for name, content in EVERY.items() if name not in LIBRARIES}
TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


def client(host: str = "127.0.0.1", **settings: object) -> TestClient:
    app = create_app(FakeEngine(), fake_model(), ServerConfig(**settings))  # type: ignore[arg-type]
    return TestClient(app, base_url="http://127.0.0.1:8080", client=(host, 5000))


def test_a_browser_gets_the_page_and_a_program_what_it_always_got() -> None:
    page = client().get("/", headers=HTML)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert '<script type="module"' in page.text
    assert client().get("/").text == "Ollama is running"
    assert client().head("/").status_code == 200


def test_every_file_is_served_with_its_type_and_the_policy() -> None:
    server = client()
    assert {"app.js", "app.css", "chat.css", "views/tree.js", "lib/dom.js", "chat/markdown.js"} <= FILES.keys()
    for name, content in EVERY.items():
        answer = server.get(f"/console/{name}")
        assert answer.status_code == 200 and answer.content == content
        assert answer.headers["content-type"] == TYPES[Path(name).suffix]
        assert answer.headers["content-security-policy"] == POLICY
        assert answer.headers["x-content-type-options"] == "nosniff"
        again = server.get(f"/console/{name}", headers={"If-None-Match": answer.headers["etag"]})
        assert again.status_code == 304 and not again.content


def test_they_are_small_and_in_the_package() -> None:
    assert sum(map(len, FILES.values())) <= MAX_BYTES
    patterns = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["server"]
    assert sum(len(gzip.compress(content)) for content in LIBRARIES.values()) <= MAX_LIBRARY_BYTES
    for name in EVERY:
        # A star of setuptools does not reach into folders.
        same_depth = [one for one in patterns if one.count("/") == f"console/{name}".count("/")]
        assert any(fnmatch.fnmatch(f"console/{name}", pattern) for pattern in same_depth), name


def test_each_library_is_one_file_with_its_licence() -> None:
    assert LIBRARIES.keys() == {"vendor/highlight.js", "vendor/temml.js"}
    for content in LIBRARIES.values():
        head = content[:3000].decode()
        assert (
            "Copyright (c)" in head
            and ("MIT License" in head or "BSD 3-Clause" in head)
            and "export" in content.decode()
        )


def test_nothing_makes_html_of_a_text_or_asks_another_host() -> None:
    for name, content in FILES.items():
        text = content.decode()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function"):
            assert word not in text, f"{name} has {word}"
        outside = [one for one in text.split("https://")[1:] if not one.startswith(("[", "www.w3.org"))]
        assert not outside, f"{name} names another host"
        assert "style=" not in text and ".style." not in text, f"{name} sets a style that the policy refuses"


@pytest.mark.parametrize(
    "path", ["/console/nothing.js", "/console/../api/app.py", "/console/%2e%2e/app.py", "/console/"]
)
def test_no_other_file_is_served(path: str) -> None:
    assert client().get(path, headers=HTML).status_code == 404


def test_without_keys_it_is_for_the_servers_own_machine() -> None:
    for path in ("/", "/console/app.js"):
        assert client("192.168.1.9").get(path, headers=HTML).status_code == 403
        forwarded = client().get(path, headers={**HTML, "X-Forwarded-For": "192.168.1.9"})
        assert forwarded.status_code == 403 and "--api-key" in forwarded.text
        renamed = client().get(path, headers={**HTML, "Host": "mac.local:8080"})
        assert renamed.status_code == 403, "a page whose name was made to point here is not this machine's"


def test_with_keys_the_page_needs_none_and_everything_else_does() -> None:
    for host in ("127.0.0.1", "192.168.1.9"):
        server = client(host, api_key="sesame")
        assert server.get("/", headers=HTML).status_code == server.get("/console/app.js").status_code == 200
        assert server.get("/").status_code == server.get("/v1/stats", headers=HTML).status_code == 401
        assert server.get("/consolex", headers=HTML).status_code == 401


def test_it_can_be_turned_off() -> None:
    server = client(console=False)
    assert server.get("/", headers=HTML).status_code == server.get("/console/app.js").status_code == 404
    assert server.get("/").text == "Ollama is running"
    assert client(console=False, api_key="sesame").get("/console/app.js").status_code == 401


def test_the_page_in_a_browser_of_this_machine_is_the_owners() -> None:
    server = client()
    own = {"Origin": "http://127.0.0.1:8080", "Host": "127.0.0.1:8080"}
    body = {"messages": [{"role": "user", "content": "Hi"}], "session_id": "theirs", "cache_salt": "x"}
    assert server.post("/v1/chat/completions", json=body).status_code == 200
    assert server.get("/v1/stats", headers=own).json()["scope"] == "all"
    assert (
        server.delete("/v1/sessions/theirs?namespace=/x", headers={**own, "X-Forwarded-For": "1.2.3.4"}).status_code
        == 404
    )
    assert server.delete("/v1/sessions/theirs?namespace=/x", headers=own).status_code == 200


def test_a_page_that_cors_let_in_is_not_the_owner() -> None:
    server = client(cors=("http://other.example",))
    assert server.get("/v1/stats", headers={"Origin": "http://other.example"}).json()["scope"] == "namespace"
