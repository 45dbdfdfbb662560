"""The paths of OpenAI's dialect, with and without the `/v1` that many clients' base URLs lack."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.openai.chat import create_chat_completion
from server.api.openai.chat_types import ChatBody, ChatChunk, ChatCompletion
from server.api.openai.completions import CompletionBody, TextCompletion, create_completion
from server.api.openai.dialect import OpenAiDialect
from server.api.openai.embeddings import EmbeddingList, EmbeddingsBody, create_embeddings
from server.api.openai.errors import ErrorBody
from server.api.openai.models import (
    LmStudioModels,
    ModelBody,
    ModelList,
    get_model,
    list_models,
    list_models_as_lm_studio,
)
from server.api.openai.rerank import RankedList, RerankBody, rerank
from server.api.openapi import Operation, Operations
from server.api.versioned import with_and_without_v1

_ROUTES = (
    Route("/chat/completions", create_chat_completion, methods=["POST"]),
    Route("/completions", create_completion, methods=["POST"]),
    Route("/embeddings", create_embeddings, methods=["POST"]),
    Route("/rerank", rerank, methods=["POST"]),
    Route("/models", list_models, methods=["GET"]),
    Route("/models/{model_id:path}", get_model, methods=["GET"]),
)
_OPERATIONS: Operations = {
    create_chat_completion: Operation(ChatBody, ChatCompletion, ChatChunk),
    create_completion: Operation(CompletionBody, TextCompletion, TextCompletion),
    create_embeddings: Operation(EmbeddingsBody, EmbeddingList),
    rerank: Operation(RerankBody, RankedList),
    list_models: Operation(answer=ModelList),
    get_model: Operation(answer=ModelBody),
    list_models_as_lm_studio: Operation(answer=LmStudioModels),
}
_LM_STUDIO = Route("/api/v1/models", list_models_as_lm_studio, methods=["GET"])
OPENAI = Api(OpenAiDialect(), (*with_and_without_v1(_ROUTES), _LM_STUDIO), _OPERATIONS, ErrorBody)
