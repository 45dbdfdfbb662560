"""`POST /v1/rerank`: documents in the order in which they match a query.

A model that was made for it judges each document together with the query; any other tells by the angle between
their vectors.

The shape is Cohere's and Jina's, as other servers have it beside OpenAI's endpoints.
"""

from collections.abc import Sequence
from typing import Annotated, Any, NotRequired, TypedDict

from pydantic import BeforeValidator, Field
from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ApiContext, ServedModel
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader
from server.api.endpoint import compute
from server.api.errors import ApiError, Code
from server.api.json_body import json_text
from server.api.openai.embeddings import EmbeddingUsage
from server.api.openai.fields import IN_RERANK
from server.api.params import Incoming
from server.api.typed_body import BodyModel, Whole, parse_body
from server.engine.embeddings import Vector


def _as_text(value: Any) -> Any:
    return value.get("text") if isinstance(value, dict) else value


class RankedText(TypedDict):
    """A document as it was sent."""

    text: str


_Document = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]


class RerankBody(BodyModel):
    """Body of `POST /v1/rerank`."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[_Document], Field(min_length=1, max_length=MAX_TEXTS - 1)]
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    """Tell so many only."""
    return_documents: bool | None = None
    """Tell the texts too; they are left out otherwise."""
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """What a match is, for models that judge; by default a passage that answers a web search."""


class RankedDocument(TypedDict):
    """A document, and how well it matches."""

    index: int
    """Its place in the request."""
    relevance_score: float
    """The probability that it matches; without a model that judges, the cosine between its vector and the query's."""
    document: NotRequired[RankedText]


class RankedList(TypedDict):
    """The documents, the best match first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


async def rerank(request: Request) -> Response:
    """Answers with the documents in their order."""
    return await compute(request, open_rerank)


def open_rerank(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Returns the checked texts; raises ApiError."""
    body = parse_body(RerankBody, dict(incoming.fields), IN_RERANK)
    model = context.find_model(body.model)
    name = f"rerank-{incoming.request_id}"
    return _judging(body, model, name) if model.reranking is not None else _comparing(body, model, name)


def _judging(body: RerankBody, model: ServedModel, name: str) -> EmbeddingWork:
    reader, how = TextReader(model, judges=True), model.reranking
    assert how is not None, "a model was to judge that does not"
    texts = [
        reader.read_pair(how, how.text(body.query, document, body.instruction), f"documents[{place}]")
        for place, document in enumerate(body.documents)
    ]

    def write(judgements: Sequence[Vector]) -> str:
        return _written(body, name, model.id, reader.num_tokens, [float(one[0]) for one in judgements])

    return EmbeddingWork(model, texts, write, reading=how.judgement)


def _comparing(body: RerankBody, model: ServedModel, name: str) -> EmbeddingWork:
    if body.instruction is not None:
        reason = f"instruction: {model.id} compares vectors of texts and takes no instruction"
        raise ApiError(Code.INVALID_VALUE, reason, "instruction")
    reader = TextReader(model)
    texts = [reader.read(body.query, "query")]
    texts += [reader.read(text, f"documents[{place}]") for place, text in enumerate(body.documents)]

    def write(vectors: Sequence[Vector]) -> str:
        query, *documents = vectors
        return _written(body, name, model.id, reader.num_tokens, [float(query @ document) for document in documents])

    return EmbeddingWork(model, texts, write)


def _written(body: RerankBody, name: str, model_id: str, num_tokens: int, scores: Sequence[float]) -> str:
    # Of documents that match alike the first stays first.
    order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
    answer: RankedList = {
        "id": name,
        "model": model_id,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        "results": [_ranked(body, place, scores[place]) for place in order],
    }
    return json_text(answer)


def _ranked(body: RerankBody, place: int, score: float) -> RankedDocument:
    ranked: RankedDocument = {"index": place, "relevance_score": score}
    if body.return_documents:
        ranked["document"] = {"text": body.documents[place]}
    return ranked
