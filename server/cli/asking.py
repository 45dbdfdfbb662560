"""A running server, asked by a command over one connection."""

from collections.abc import Mapping
from typing import Any

import httpx2

from server.errors import StartError

TIMEOUT_SECONDS = 30.0


class AskedServer:
    """What is there at an address."""

    def __init__(self, url: str, api_key: str | None, timeout_seconds: float = TIMEOUT_SECONDS) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.url = url.rstrip("/")
        self._client = httpx2.Client(timeout=timeout_seconds, trust_env=False, headers=headers)

    def get(self, path: str, query: Mapping[str, str | int] | None = None) -> Any:
        """Returns the answer's object; raises StartError with a sentence where there is none."""
        try:
            answer = self._client.get(self.url + path, params=dict(query or {}))
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            raise StartError(f"no server answers at {self.url}") from error
        if answer.status_code == httpx2.codes.UNAUTHORIZED:
            raise StartError(f"the server at {self.url} asks for a key: --api-key or MLX_SERVE_API_KEY gives it")
        try:
            found = answer.json()
            if answer.status_code == httpx2.codes.OK:
                return found
            said = str(found["error"]["message"])
        except (ValueError, KeyError, TypeError):
            said = f"status {answer.status_code}"
        raise StartError(f"the server at {self.url} refuses: {said}")
