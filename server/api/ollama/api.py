"""The paths of Ollama's dialect."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.ollama.dialect import ErrorText, OllamaDialect
from server.api.ollama.generate import (
    EmbedAnswer,
    EmbedBody,
    EmbeddingAnswer,
    EmbeddingPromptBody,
    OllamaChatAnswer,
    OllamaChatBody,
    OllamaGenerateAnswer,
    OllamaGenerateBody,
    chat,
    embed,
    embed_prompt,
    generate_text,
)
from server.api.ollama.manage import (
    CopyBody,
    CreateBody,
    CreateStatus,
    DeleteBody,
    PullBody,
    PullStatus,
    copy_model,
    create_model,
    delete_model,
    pull_model,
)
from server.api.ollama.models import (
    RunningList,
    ShowBody,
    ShownBody,
    TagsBody,
    VersionBody,
    ps,
    root,
    show,
    tags,
    version,
)
from server.api.openapi import Operation, Operations

NDJSON = OllamaDialect.stream_media_type

_ROUTES = (
    Route("/api/chat", chat, methods=["POST"]),
    Route("/api/generate", generate_text, methods=["POST"]),
    Route("/api/embed", embed, methods=["POST"]),
    Route("/api/embeddings", embed_prompt, methods=["POST"]),
    Route("/api/tags", tags, methods=["GET"]),
    Route("/api/show", show, methods=["POST"]),
    Route("/api/pull", pull_model, methods=["POST"]),
    Route("/api/create", create_model, methods=["POST"]),
    Route("/api/copy", copy_model, methods=["POST"]),
    Route("/api/delete", delete_model, methods=["DELETE"]),
    Route("/api/ps", ps, methods=["GET"]),
    Route("/api/version", version, methods=["GET"]),
    Route("/", root, methods=["GET"]),
)
_OPERATIONS: Operations = {
    chat: Operation(OllamaChatBody, OllamaChatAnswer, OllamaChatAnswer, NDJSON),
    generate_text: Operation(OllamaGenerateBody, OllamaGenerateAnswer, OllamaGenerateAnswer, NDJSON),
    embed: Operation(EmbedBody, EmbedAnswer),
    embed_prompt: Operation(EmbeddingPromptBody, EmbeddingAnswer),
    tags: Operation(answer=TagsBody),
    show: Operation(ShowBody, ShownBody),
    pull_model: Operation(PullBody, PullStatus, PullStatus, NDJSON),
    create_model: Operation(CreateBody, CreateStatus, CreateStatus, NDJSON),
    copy_model: Operation(CopyBody),
    delete_model: Operation(DeleteBody),
    ps: Operation(answer=RunningList),
    version: Operation(answer=VersionBody),
    root: Operation(answer=str, answer_type="text/plain"),
}
OLLAMA = Api(OllamaDialect(), _ROUTES, _OPERATIONS, ErrorText, own_paths=("/api",))
