"""The paths of OpenAI's dialect, LM Studio's included.

`POST /v1/rerank` is that of Cohere and Jina. A model made for reranking judges each document with the query; another
compares their vectors by the cosine. `POST /v1/cache/prime` evaluates a prefix, and generates nothing: a conversation
is rendered only as far as no later message can change its tokens. An answer follows a user's or tool's message, a
user's message any other.
"""

import base64
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, Literal, NotRequired, TypeAlias

import numpy as np
from pydantic import BeforeValidator, Field
from typing_extensions import TypedDict

from cache.snapshots import RestorePointKind
from models.formats import Vector, judged_text
from server.api import PRODUCT
from server.api.answer import Answer, Exchange
from server.api.bodies import BodyModel, Rules, Whole, parse_body, refused
from server.api.call import generate, planned
from server.api.conversation import cut_at_last_point
from server.api.dialect import ApiContext, Dialect, Endpoint, Operation, describe_models, with_and_without_v1
from server.api.embedding import MAX_TEXTS, EmbeddingWork, TextReader, object_json, shortened, vector_json
from server.api.errors import Code, wrong
from server.api.generation import IN_TEXT, read_params
from server.api.openai.chat import IN_CHAT, ChatBody, read_conversation
from server.api.openai.generate import ROUTES, CompletionBody
from server.api.params import Incoming, Limit, question_of, text_prompt
from server.api.wire import Payload, body_of, json_text
from server.pool.served import ListedModel, ServedModel

_OF_VECTORS: Rules = refused("""
    a text that is too long is answered with an error, never cut: max_tokens_per_doc max_chunks_per_doc
        truncate_prompt_tokens=-1
""")


def _as_list(value: Any) -> Any:
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
    """Number of first numbers of each vector to return."""


IN_EMBEDDINGS: Rules = _OF_VECTORS | refused("""
    texts have the tokens that the tokenizer puts around them: add_special_tokens=true
    a vector has the length 1: normalize=true embd_normalize=2
    texts are embedded as they are, without a template: task input_type messages=[]
""")


class EmbeddingBody(TypedDict):
    """The vector of one text."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


EmbeddingUsage: TypeAlias = dict[Literal["prompt_tokens", "total_tokens"], int]


class EmbeddingList(TypedDict):
    """The vectors, in the order of the texts."""

    object: Literal["list"]
    model: str
    usage: EmbeddingUsage
    data: list[EmbeddingBody]


@planned
def create_embeddings(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Answers with vectors."""
    body = parse_body(EmbeddingsBody, incoming.fields, IN_EMBEDDINGS)
    reader = TextReader(context.pool.find(body.model))
    texts = [reader.read(text, f"input[{place}]") for place, text in enumerate(body.input)]
    encode = _base64_json if body.encoding_format == "base64" else vector_json

    def write(vectors: Sequence[Vector]) -> str:
        data = [
            f'{{"object":"embedding","index":{place},"embedding":{encode(vector)}}}'
            for place, vector in enumerate(shortened(vectors, body.dimensions))
        ]
        usage = {"prompt_tokens": reader.num_tokens, "total_tokens": reader.num_tokens}
        return object_json({"object": "list", "model": reader.model.id, "usage": usage}, "data", data)

    return EmbeddingWork(reader.model, texts, write)


def _base64_json(vector: Vector) -> str:
    return json_text(base64.b64encode(np.asarray(vector, "<f4").tobytes()).decode())


def _as_text(value: Any) -> Any:
    return value.get("text") if isinstance(value, dict) else value


_Document = Annotated[str, BeforeValidator(_as_text, json_schema_input_type=str | dict[str, Any])]


class RerankBody(BodyModel):
    """Body of `POST /v1/rerank`."""

    model: str | None = None
    query: Annotated[str, Field(min_length=1)]
    documents: Annotated[list[_Document], Field(min_length=1, max_length=MAX_TEXTS - 1)]
    top_n: Annotated[Whole, Field(ge=1)] | None = None
    return_documents: bool | None = None
    instruction: Annotated[str, Field(min_length=1)] | None = None
    """The meaning of a match, for models that judge."""


IN_RERANK: Rules = _OF_VECTORS | refused("""
    a document is a text, or an object with a text: rank_fields=[]|["text"]
""")


class RankedDocument(TypedDict):
    """A document, and how well it matches."""

    index: int
    relevance_score: float
    """The probability of a match, or the cosine."""
    document: NotRequired[dict[Literal["text"], str]]


class RankedList(TypedDict):
    """The documents, the best match first."""

    id: str
    model: str
    usage: EmbeddingUsage
    results: list[RankedDocument]


@planned
def rerank(context: ApiContext, incoming: Incoming) -> EmbeddingWork:
    """Answers with the documents in their order."""
    body = parse_body(RerankBody, incoming.fields, IN_RERANK)
    model = context.pool.find(body.model)
    how, documents = model.reranking, [(text, f"documents[{place}]") for place, text in enumerate(body.documents)]
    if how is None and body.instruction is not None:
        raise wrong("instruction", f"{model.id} compares vectors of texts and takes no instruction")
    reader = TextReader(model, judges=how is not None)
    if how is not None:
        texts = [reader.read_pair(judged_text(body.query, one, body.instruction), place) for one, place in documents]
    else:
        texts = [reader.read(text, place) for text, place in [(body.query, "query"), *documents]]

    def write(vectors: Sequence[Vector]) -> str:
        if how is not None:
            scores = [float(judgement[0]) for judgement in vectors]
        else:
            scores = [float(vectors[0] @ document) for document in vectors[1:]]
        # Documents with equal scores keep their order.
        order = sorted(range(len(scores)), key=lambda place: -scores[place])[: body.top_n]
        results: list[RankedDocument] = [{"index": place, "relevance_score": scores[place]} for place in order]
        for one in results if body.return_documents else ():
            one["document"] = {"text": body.documents[one["index"]]}
        answer: RankedList = {
            "id": f"rerank-{incoming.request_id}",
            "model": model.id,
            "usage": {"prompt_tokens": reader.num_tokens, "total_tokens": reader.num_tokens},
            "results": results,
        }
        return json_text(answer)

    return EmbeddingWork(model, texts, write, reading=how)


_PRIME = refused("priming is there to keep one prompt, and has no text to stream: cache_prompt=true stream=false n=1")
IN_CHAT_PRIME = IN_CHAT | _PRIME
IN_TEXT_PRIME = IN_TEXT | _PRIME | refused("priming has no answer that could repeat the prompt: echo=false")


class PrimedBody(TypedDict):
    """What priming cost."""

    id: str
    object: str
    model: str
    session_id: str | None
    tokens: int
    cached_tokens: int
    evaluated_tokens: int
    ms: float


@generate("prime-", may_stream=False)
def prime_cache(context: ApiContext, incoming: Incoming) -> Exchange:
    """Evaluates a prefix; the state stays if the client leaves."""
    is_chat = "messages" in incoming.fields
    if is_chat == ("prompt" in incoming.fields):
        raise wrong("messages", "send either messages or a prompt to prime", Code.MISSING_PARAMETER)
    kind: type[ChatBody | CompletionBody] = ChatBody if is_chat else CompletionBody
    body = parse_body(kind, incoming.fields, IN_CHAT_PRIME if is_chat else IN_TEXT_PRIME)
    model = context.pool.find(body.model)
    if isinstance(body, ChatBody):
        prefix = read_conversation(body, incoming, model).stable_prefix()
    elif len(body.prompt) != 1:
        raise wrong("prompt", "one prompt is primed at a time")
    else:
        prefix = cut_at_last_point(text_prompt(body.prompt[0], model), (RestorePointKind.PROMPT_END,))
    params = replace(read_params(body, model), limit=Limit(0), prompt_param="messages" if is_chat else "prompt")
    return PrimeExchange(question_of(incoming, model, prefix, params, incoming.namespace(body.cache_salt)))


class PrimeExchange(Exchange):
    """Writes what priming cost."""

    async def body(self, answer: Answer) -> Payload:
        """The answer's body."""
        _, finished = await answer.read()
        return body_of(
            PrimedBody,
            finished.timings,
            id=self.request.request_id,
            object="cache.prime",
            model=self.model.id,
            session_id=self.request.session_id,
            tokens=finished.prompt_tokens,
            cached_tokens=finished.timings.cache_tokens,
            ms=finished.timings.prompt_ms,
        )


class ModelBody(TypedDict):
    """One model that requests may name."""

    id: str
    object: str
    created: int
    owned_by: str
    root: str
    """The model without an adapter."""
    parent: str | None
    loaded: bool
    """Otherwise the first request that names it loads it."""
    context_length: int | None
    tool_calls: str | None
    """None until loaded."""
    capabilities: list[str]
    """In Ollama's words."""
    max_model_len: int | None
    """Other servers' name of the same number."""


class ModelList(TypedDict):
    """All models that requests may name."""

    object: str
    data: list[ModelBody]


def _body(model: ListedModel) -> ModelBody:
    return body_of(
        ModelBody,
        model,
        object="model",
        owned_by=PRODUCT,
        root=model.parent_id or model.id,
        parent=model.parent_id,
        loaded=isinstance(model, ServedModel),
        context_length=model.context_tokens,
        tool_calls=model.tool_calls if isinstance(model, ServedModel) else None,
        capabilities=list(model.capabilities),
        max_model_len=model.context_tokens,
    )


def _lm_studio_model(model: ListedModel) -> Payload:
    """One model in LM Studio's words."""
    facts, is_loaded, (publisher, _, name) = model.facts, isinstance(model, ServedModel), model.id.rpartition("/")
    bits, config = facts.weight_format.removesuffix("-bit"), {"context_length": model.context_tokens}
    can = {"vision": "vision" in model.capabilities, "trained_for_tool_use": "tools" in model.capabilities}
    return {
        "type": "llm",
        "publisher": publisher,
        "key": model.id,
        "display_name": name,
        "architecture": facts.architecture,
        "quantization": {"name": f"{bits}bit", "bits_per_weight": int(bits)} if bits.isdecimal() else None,
        "size_bytes": facts.stored_bytes,
        "params_string": f"{facts.num_parameters / 10**9:.2g}B" if facts.num_parameters else None,
        "loaded_instances": [{"id": model.id, "config": config}] if is_loaded else [],
        "max_context_length": model.context_tokens,
        "format": "mlx",
        "capabilities": can,
        "description": None,
    }


_MODELS = describe_models(_body, lambda models: ModelList(object="list", data=models))
_ROUTES = (
    Endpoint("/embeddings", create_embeddings, Operation(EmbeddingsBody, EmbeddingList)),
    Endpoint("/rerank", rerank, Operation(RerankBody, RankedList)),
    *ROUTES,
    Endpoint("/cache/prime", prime_cache, Operation(ChatBody | CompletionBody, PrimedBody)),
    Endpoint("/models", _MODELS, Operation(answer=ModelList)),
    Endpoint("/models/{model_id:path}", _MODELS, Operation(answer=ModelBody)),
)
_IN_LM_STUDIO = describe_models(_lm_studio_model, lambda models: {"models": models})
_LM_STUDIO = Endpoint(
    "/api/v1/models", _IN_LM_STUDIO, Operation(answer=dict[Literal["models"], list[dict[str, Any]]])
)
OPENAI = Dialect((*with_and_without_v1(_ROUTES), _LM_STUDIO))
