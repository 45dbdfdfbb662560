"""`POST /api/embed` and its forerunner `/api/embeddings`: vectors of texts as Ollama gives them."""

import time
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, TypedDict

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ApiContext
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader, object_json, shortened, vector_json
from server.api.endpoint import compute
from server.api.ollama.body import KeepAlive, find_model, keep_alive_seconds
from server.api.ollama.fields import IN_EMBED, IN_EMBEDDING
from server.api.params import Incoming
from server.api.typed_body import BodyModel, Whole, parse_body
from server.engine.embeddings import Vector

_NANOSECONDS = 1_000_000_000


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class _VectorsBody(BodyModel):
    model: str | None = None
    keep_alive: KeepAlive = None
    """How long the model stays loaded after its last request."""


class EmbedBody(_VectorsBody):
    """Body of `POST /api/embed`."""

    input: Annotated[
        list[str],
        Field(max_length=MAX_TEXTS),
        BeforeValidator(_as_list, json_schema_input_type=str | list[str]),
    ]
    truncate: bool | None = None
    """False: a text that is too long is an error; otherwise it loses its end."""
    dimensions: Annotated[Whole, Field(ge=1)] | None = None


class EmbeddingPromptBody(_VectorsBody):
    """Body of `POST /api/embeddings`."""

    prompt: str | None = None


class EmbedAnswer(TypedDict):
    """The vectors of all texts, and what they took."""

    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: list[list[float]]


class EmbeddingAnswer(TypedDict):
    """The vector of one text; an empty one of an empty text."""

    embedding: list[float]


async def embed(request: Request) -> Response:
    """Answers with the vectors of texts."""
    return await compute(request, open_embed)


async def embed_prompt(request: Request) -> Response:
    """Answers with the vector of one text."""
    return await compute(request, open_embedding)


def open_embed(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked texts; raises ApiError."""
    began = time.monotonic()
    body = parse_body(EmbedBody, dict(incoming.fields), IN_EMBED)
    reader = TextReader(find_model(context, body.model), cuts=body.truncate is not False)
    texts = [reader.read(text, f"input[{place}]") for place, text in enumerate(body.input)]
    write = partial(_written, body, reader.num_tokens, began)
    return EmbeddingWork(reader.model, texts, write, keep_alive_seconds(body.keep_alive))


def open_embedding(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked text; raises ApiError."""
    body = parse_body(EmbeddingPromptBody, dict(incoming.fields), IN_EMBEDDING)
    reader = TextReader(find_model(context, body.model), cuts=True)
    texts = [reader.read(body.prompt, "prompt")] if body.prompt else []
    return EmbeddingWork(reader.model, texts, _written_alone, keep_alive_seconds(body.keep_alive))


def _written(body: EmbedBody, num_tokens: int, began: float, vectors: Sequence[Vector]) -> str:
    rows = [vector_json(vector) for vector in shortened(vectors, body.dimensions)]
    head = {
        "model": body.model,
        "total_duration": int((time.monotonic() - began) * _NANOSECONDS),
        "load_duration": 0,
        "prompt_eval_count": num_tokens,
    }
    return object_json(head, "embeddings", rows)


def _written_alone(vectors: Sequence[Vector]) -> str:
    return f'{{"embedding":{vector_json(vectors[0]) if vectors else "[]"}}}'
