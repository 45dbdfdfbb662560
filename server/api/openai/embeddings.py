"""`POST /v1/embeddings`: vectors of texts, as numbers or in base64."""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, TypedDict

import numpy as np
from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ApiContext
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader, object_json, shortened, vector_json
from server.api.endpoint import compute
from server.api.json_body import json_text
from server.api.openai.fields import IN_EMBEDDINGS
from server.api.params import Incoming
from server.api.typed_body import BodyModel, Whole, parse_body
from server.engine.embeddings import Vector


def _as_list(value: Any) -> Any:
    """A text by itself, or the tokens of one, is a list of one."""
    is_one = isinstance(value, str) or (isinstance(value, list) and bool(value) and isinstance(value[0], int))
    return [value] if is_one else value


class EmbeddingsBody(BodyModel):
    """Body of `POST /v1/embeddings`."""

    model: str | None = None
    input: Annotated[
        list[str | list[int]],
        Field(min_length=1, max_length=MAX_TEXTS),
        BeforeValidator(_as_list, json_schema_input_type=str | list[int] | list[str | list[int]]),
    ]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    """Give so many numbers of each vector, the first ones."""


class EmbeddingBody(TypedDict):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingUsage(TypedDict):
    """What the texts took."""

    prompt_tokens: int
    total_tokens: int


class EmbeddingList(TypedDict):
    """The vectors of a request, in the order of its texts."""

    object: Literal["list"]
    model: str
    usage: EmbeddingUsage
    data: list[EmbeddingBody]


async def create_embeddings(request: Request) -> Response:
    """Answers with vectors."""
    return await compute(request, open_embeddings)


def open_embeddings(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked texts; raises ApiError."""
    body = parse_body(EmbeddingsBody, dict(incoming.fields), IN_EMBEDDINGS)
    reader = TextReader(context.find_model(body.model))
    texts = [reader.read(text, f"input[{place}]") for place, text in enumerate(body.input)]
    write = partial(_written, body, reader.model.id, reader.num_tokens)
    return EmbeddingWork(reader.model, texts, write)


def _written(body: EmbeddingsBody, model_id: str, num_tokens: int, vectors: Sequence[Vector]) -> str:
    encode = _base64_json if body.encoding_format == "base64" else vector_json
    data = [
        f'{{"object":"embedding","index":{place},"embedding":{encode(vector)}}}'
        for place, vector in enumerate(shortened(vectors, body.dimensions))
    ]
    usage: EmbeddingUsage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return object_json({"object": "list", "model": model_id, "usage": usage}, "data", data)


def _base64_json(vector: Vector) -> str:
    return json_text(base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode())
