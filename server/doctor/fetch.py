"""Reads the sessions of a running server. Raises DoctorError, one sentence each, for whatever is in the way."""

import json
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlencode, urlsplit
from urllib.request import ProxyHandler, Request, build_opener

from server.errors import DoctorError

DEFAULT_URL = "http://127.0.0.1:8080"
TIMEOUT_SECONDS = 10.0


class Sessions:
    """The sessions that a key and a salt may see on one server."""

    def __init__(self, url: str, api_key: str | None = None, cache_salt: str | None = None) -> None:
        """`url` is the server's address, with or without `http://` and `/v1`; raises DoctorError for no address."""
        self.url = _base_url(url)
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._query = f"?{urlencode({'cache_salt': cache_salt})}" if cache_salt else ""
        # A proxy for the web is of no use on the way to one's own machine.
        self._opener = build_opener(ProxyHandler({}))

    def read(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Returns every session with its turns, and what was refused, the last first."""
        listed = self._get("/v1/sessions")
        if listed is None or not isinstance(listed.get("data"), list):
            raise self._is_another()
        # One may have been forgotten since it was listed.
        found = (self._read_one(str(session["id"]), session.get("namespace")) for session in listed["data"])
        return [session for session in found if session is not None], list(listed.get("refused", ()))

    def _read_one(self, session_id: str, namespace: str | None) -> dict[str, Any] | None:
        """Returns one session. Who sends neither key nor salt may see several namespaces, so it is named."""
        is_named = namespace and not self._headers and not self._query
        query = f"?{urlencode({'namespace': namespace})}" if is_named else ""
        return self._get(f"/v1/sessions/{quote(session_id, safe='')}{query}")

    def _get(self, path: str) -> dict[str, Any] | None:
        """Returns the body, or None with status 404."""
        request = Request(self.url + path + self._query, headers=self._headers)
        try:
            with self._opener.open(request, timeout=TIMEOUT_SECONDS) as answer:
                body = json.load(answer)
        except HTTPError as error:
            self._check_status(error)
            return None
        except URLError as error:
            raise DoctorError(f"no server answers at {self.url}: {_reason(error)}") from error
        except OSError as error:
            raise DoctorError(f"the server at {self.url} broke off: {_reason(error)}") from error
        except Exception as error:  # whatever another program sends, down to the status line
            raise self._is_another() from error
        if not isinstance(body, dict):
            raise self._is_another()
        return body

    def _check_status(self, error: HTTPError) -> None:
        with error:
            if error.code == 401:
                raise DoctorError(
                    f"the server at {self.url} asks for a key; give it with --api-key or MLX_SERVE_API_KEY"
                ) from error
            if error.code != 404:
                raise DoctorError(f"the server at {self.url} answers with status {error.code}") from error

    def _is_another(self) -> DoctorError:
        return DoctorError(f"what answers at {self.url} is not mlx-serve, or one without /v1/sessions")


def _base_url(url: str) -> str:
    text = url if "://" in url else f"http://{url}"
    try:
        parts = urlsplit(text)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise DoctorError(f"{url!r} is no address of a server; write it like {DEFAULT_URL}")
    return text.rstrip("/").removesuffix("/v1")


def _reason(error: OSError) -> str:
    reason = getattr(error, "reason", None) or error
    return getattr(reason, "strerror", None) or str(reason) or type(reason).__name__
