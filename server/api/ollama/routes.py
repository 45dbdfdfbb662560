"""The paths of Ollama's dialect."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.ollama.chat import chat
from server.api.ollama.dialect import OllamaDialect
from server.api.ollama.generate import generate_text
from server.api.ollama.models import ps, root, show, tags, version

_ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate_text, methods=["POST"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/version", version, methods=["GET"]),
    Route("/", root, methods=["GET"]),
)
OLLAMA = Api(OllamaDialect(), _ROUTES, own_paths=("/api",))
