"""The paths of Ollama's dialect."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.ollama.chat import chat
from server.api.ollama.dialect import OllamaDialect
from server.api.ollama.generate import generate_text

_ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate_text, methods=["POST"]),
)
OLLAMA = Api(OllamaDialect(), _ROUTES, own_paths=("/api/",))
