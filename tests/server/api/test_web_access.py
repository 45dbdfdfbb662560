"""No web page uses the server unless it is the server's own or was named: rebound names, foreign origins, forms."""

import itertools
from typing import Any

import pytest
from starlette.datastructures import Headers
from starlette.testclient import TestClient

from server.api.errors import ApiError
from server.api.guard import check_web_access
from server.app.config import ConfigError, ServerConfig
from server.cli.config import load_config
from tests.support.apps import create_app
from tests.support.fake_engine import FakeEngine, fake_model

CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
PAGE = "https://chat.example.org"
JSON = {"content-type": "application/json"}


def client_of(host: str = "127.0.0.1:8080", **settings: Any) -> TestClient:
    app = create_app(FakeEngine(), fake_model(), ServerConfig(**settings))
    return TestClient(app, base_url=f"http://{host}")


def code_of(answer: Any) -> str:
    return str(answer.json()["error"]["code"])


# ------------------------------------------------------------------------------------------------ by which name


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1", "127.0.0.1:8080", "[::1]:8080", "localhost:8080", "LOCALHOST.", "app.localhost", "127.1",
        "192.168.1.20:8080", "mac-studio", "mac-studio.local:8080", "host.docker.internal:8080", "mlx-serve:8080",
    ],
)  # fmt: skip
def test_names_that_nobody_can_register_and_addresses_are_served(host: str) -> None:
    check_web_access(ServerConfig(), "GET", Headers({"host": host}))


@pytest.mark.parametrize(
    "host",
    [
        "evil.example", "evil.example:8080", "127.0.0.1.evil.example", "localhost.evil.example", "evil.example.",
        "evillocal.example", "", "a b", "localhost@evil.example", "localhost/evil.example", "::1", "localhost:x",
    ],
)  # fmt: skip
def test_a_name_that_a_page_could_rebind_is_refused(host: str) -> None:
    with pytest.raises(ApiError, match="not known as"):
        check_web_access(ServerConfig(), "GET", Headers({"host": host}))


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/v1/cache"), ("GET", "/v1/models"), ("POST", CHAT), ("GET", "/health"), ("GET", "/v1/sessions")],
)
def test_a_rebound_name_reaches_nothing(method: str, path: str) -> None:
    answer = client_of("evil.example:8080").request(method, path, json=HI if method == "POST" else None)
    assert (answer.status_code, code_of(answer)) == (403, "host_not_allowed")


def test_a_name_that_was_configured_is_served_in_any_case_and_every_name_behind_a_key() -> None:
    assert client_of("LLM.example.org", allowed_hosts=("llm.example.org.",)).get("/v1/models").status_code == 200
    assert client_of("other.example.org", allowed_hosts=("llm.example.org",)).get("/v1/models").status_code == 403
    assert client_of("evil.example", allowed_hosts=("*",)).get("/v1/models").status_code == 200
    keyed = client_of("evil.example", api_key="secret")
    assert keyed.get("/v1/models").status_code == 401
    assert keyed.get("/v1/models", headers={"authorization": "Bearer secret"}).status_code == 200


# ---------------------------------------------------------------------------------------------- from which page


@pytest.mark.parametrize(
    "origin",
    [PAGE, "null", "http://127.0.0.1:3000", "http://localhost:8080", "http://127.0.0.1", "app://obsidian.md",
     "file://", "http://127.0.0.1:8080.evil.example", "http://127.0.0.1:80800", "http://[", ""],
)  # fmt: skip
@pytest.mark.parametrize(("method", "path"), [("POST", "/v1/cache/clear"), ("POST", CHAT), ("GET", "/v1/cache")])
def test_a_page_of_another_origin_is_refused(method: str, path: str, origin: str) -> None:
    engine = FakeEngine()
    client = TestClient(create_app(engine, fake_model(), ServerConfig()), base_url="http://127.0.0.1:8080")
    answer = client.request(method, path, json=HI if path == CHAT else None, headers={"origin": origin})
    assert (answer.status_code, code_of(answer)) == (403, "origin_not_allowed")
    assert engine.requests == []
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    ("host", "origin"),
    [("127.0.0.1:8080", "http://127.0.0.1:8080"), ("[::1]:8080", "http://[::1]:8080"),
     ("mac.local", "http://mac.local"), ("mac.local", "https://mac.local"), ("mac.local:443", "https://MAC.local")],
)  # fmt: skip
def test_the_servers_own_pages_may_use_it(host: str, origin: str) -> None:
    assert client_of(host).post(CHAT, json=HI, headers={"origin": origin}).status_code == 200


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/cache", "/v1/models", "/api/tags", "/slots"])
@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_page_embeds_nothing_of_a_foreign_server(site: str, path: str) -> None:
    for headers in ({}, {"sec-fetch-mode": "no-cors"}):
        answer = client_of().get(path, headers={**headers, "sec-fetch-site": site})
        assert (answer.status_code, "page" in answer.text) == (403, True)


@pytest.mark.parametrize("site", ["cross-site", "same-site"])
def test_a_request_that_its_browser_calls_foreign_changes_nothing_even_without_an_origin(site: str) -> None:
    headers = {"sec-fetch-site": site}
    answer = client_of().post("/v1/cache/clear", headers=headers)
    assert (answer.status_code, code_of(answer)) == (403, "origin_not_allowed")
    # A link that leads here is followed, for instance.
    assert client_of().get("/v1/models", headers={**headers, "sec-fetch-mode": "navigate"}).status_code == 200


# ------------------------------------------------------------------------------------------------ with what body


@pytest.mark.parametrize(
    "content_type",
    ["text/plain", "text/plain;charset=UTF-8", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x",
     None, "", "application/jsonp", "text/json", "json"],
)  # fmt: skip
@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/v1/cache/clear", "/v1/cache/prime"])
def test_a_body_that_a_form_can_send_is_refused(path: str, content_type: str | None) -> None:
    headers = {} if content_type is None else {"content-type": content_type}
    answer = client_of().post(path, content=b'{"messages": []}', headers=headers)
    assert (answer.status_code, code_of(answer)) == (415, "unsupported_media_type")


@pytest.mark.parametrize(
    "content_type", ["application/x-www-form-urlencoded", "text/plain", "application/json", None]
)
def test_a_program_may_send_ollama_any_type_and_a_page_only_json(content_type: str | None) -> None:
    body = b'{"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}'
    kind = {} if content_type is None else {"content-type": content_type}
    assert client_of().post("/api/chat", content=body, headers=kind).status_code == 200
    browsers: list[dict[str, str]] = [
        {"origin": "http://127.0.0.1:8080"},
        {"origin": PAGE},
        {"sec-fetch-site": "same-origin"},
        {"sec-fetch-site": "none"},
        {"sec-fetch-mode": "no-cors"},
        {"sec-fetch-dest": "empty"},
    ]
    for sent in browsers:
        answer = client_of(cors=(PAGE,)).post("/api/chat", content=body, headers={**kind, **sent})
        assert answer.status_code == (200 if content_type == "application/json" else 415), sent
    foreign = client_of().post("/api/chat", content=body, headers={**kind, "origin": "https://evil.example"})
    rebound = client_of("evil.example").post("/api/chat", content=body, headers=kind)
    assert (foreign.status_code, rebound.status_code) == (403, 403)
    assert set(foreign.json()) == {"error"}


def test_a_body_in_parts_needs_the_type_too() -> None:
    answer = client_of().post(CHAT, content=iter([b"{}"]), headers={"content-type": "text/plain"})
    assert answer.status_code == 415


@pytest.mark.parametrize(
    "content_type", ["application/json", "Application/JSON; charset=utf-8", "application/merge-patch+json"]
)
def test_json_is_taken_and_no_body_needs_no_type(content_type: str) -> None:
    body = b'{"messages": [{"role": "user", "content": "Hi"}]}'
    assert client_of().post(CHAT, content=body, headers={"content-type": content_type}).status_code == 200
    check_web_access(ServerConfig(), "POST", Headers({"host": "localhost", "content-length": "0"}))
    check_web_access(ServerConfig(), "POST", Headers({"host": "localhost"}))


# ---------------------------------------------------------------------------------------------------------- CORS


def preflight(client: TestClient, origin: str, path: str = CHAT) -> Any:
    asked = {"origin": origin, "access-control-request-method": "POST"}
    return client.options(path, headers={**asked, "access-control-request-headers": "authorization,content-type"})


def test_without_cors_a_browser_is_told_no() -> None:
    answer = preflight(client_of(), PAGE)
    assert answer.status_code == 403
    assert not any(name.startswith("access-control") for name in answer.headers)


def test_an_origin_that_was_named_may_ask_and_read_answers_and_errors() -> None:
    client = client_of(cors=(PAGE, "app://obsidian.md"))
    asked = preflight(client, PAGE)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert "POST" in asked.headers["access-control-allow-methods"]
    assert asked.headers["access-control-allow-headers"].lower() == "authorization,content-type"
    for body, status in ((HI, 200), ({}, 400)):
        answer = client.post(CHAT, json=body, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, PAGE)
        assert "origin" in answer.headers["vary"].lower()
        assert "access-control-allow-credentials" not in answer.headers


def test_another_origin_stays_out_when_one_was_named() -> None:
    client = client_of(cors=(PAGE,))
    for origin in ("https://chat.example.org.evil.example", "http://chat.example.org", "null", "https://example.org"):
        assert preflight(client, origin).status_code == 400
        answer = client.post(CHAT, json=HI, headers={"origin": origin})
        assert (answer.status_code, code_of(answer)) == (403, "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


def test_a_preflight_needs_no_key_but_the_request_does() -> None:
    client = client_of(cors=(PAGE,), api_key="secret")
    assert preflight(client, PAGE).status_code == 200
    wrong = client.post(CHAT, json=HI, headers={"origin": PAGE})
    assert (wrong.status_code, wrong.headers["access-control-allow-origin"]) == (401, PAGE)
    right = client.post(CHAT, json=HI, headers={"origin": PAGE, "authorization": "Bearer secret"})
    assert right.status_code == 200


@pytest.mark.parametrize("origin", ["chat.example.org", "https://chat.example.org/", "https://", "https://a b", "x"])
def test_what_no_browser_sends_as_an_origin_is_refused_at_the_start(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors"):
        load_config({"cors": [origin]}, {})


def test_every_origin_is_let_in_only_together_with_a_key() -> None:
    with pytest.raises(ConfigError, match="--api-key"):
        load_config({"cors": ["*"]}, {})
    assert load_config({"cors": ["*"], "api_key": "secret"}, {}).cors == ("*",)
    client = client_of(cors=("*",), api_key="secret")
    headers = {"origin": "null", "authorization": "Bearer secret"}
    assert client.post(CHAT, json=HI, headers=headers).status_code == 200


# ------------------------------------------------------------------------------------------------------ together


def test_no_combination_of_a_foreign_page_gets_through() -> None:
    """Whatever a page can do without a preflight: it sets neither Host, nor Origin, nor a JSON type."""
    config = ServerConfig(allowed_hosts=("llm.example.org",), cors=(PAGE,))
    hosts = ("127.0.0.1:8080", "localhost:8080", "evil.example:8080")
    origins = ("https://evil.example", "http://evil.example:8080", "null")
    types = ("text/plain", "application/x-www-form-urlencoded", "application/json")
    for host, origin, kind in itertools.product(hosts, origins, types):
        given = Headers({"host": host, "origin": origin, "content-type": kind, "content-length": "2"})
        with pytest.raises(ApiError):
            check_web_access(config, "POST", given)
