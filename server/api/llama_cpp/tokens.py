"""`POST /tokenize` and `/detokenize`: text to tokens and back, without asking the model."""

from typing import NotRequired, TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ApiContext, TokenReader
from server.api.dialect import Payload
from server.api.endpoint import inspect
from server.api.llama_cpp.template import rendered
from server.api.params import Incoming, check_token_ids
from server.api.typed_body import BodyModel, parse_body


class TokenizeBody(BodyModel):
    """Body of `POST /tokenize`."""

    model: str | None = None
    content: str | None = None
    prompt: str | None = None
    """The text, as vLLM calls it."""
    add_special_tokens: bool | None = None
    """vLLM's name of `add_special`; with `prompt` it is true by default."""
    add_special: bool | None = None
    """Put those tokens around it that the tokenizer puts around a prompt."""
    parse_special: bool | None = None
    """False: names of special tokens in the text are text."""
    with_pieces: bool | None = None


class DetokenizeBody(BodyModel):
    """Body of `POST /detokenize`."""

    model: str | None = None
    tokens: list[int] | None = None


class TokenPiece(TypedDict):
    """A token with its text, or with its bytes where they are no text."""

    id: int
    piece: str | list[int]


class TokensBody(TypedDict):
    """The tokens of a text, and what vLLM says beside them where it was asked in vLLM's words."""

    tokens: list[int] | list[TokenPiece]
    count: NotRequired[int]
    max_model_len: NotRequired[int]


class ContentBody(TypedDict):
    """The text of tokens, by the names that llama.cpp and vLLM have for it."""

    content: str
    prompt: str


async def tokenize(request: Request) -> Response:
    """Answers with the tokens of a text."""
    return await inspect(request, tokens_of)


async def detokenize(request: Request) -> Response:
    """Answers with the text of tokens."""
    return await inspect(request, content_of)


def tokens_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the tokens of a text or a conversation; raises ApiError and the renderer's errors."""
    body = parse_body(TokenizeBody, dict(incoming.fields), {})
    model = context.find_model(body.model)
    if "messages" in incoming.fields:
        found = rendered(context, incoming).tokens.tolist()
    else:
        wants_special = (body.add_special, body.add_special_tokens)
        found = model.renderer.tokenize(
            body.content or body.prompt or "",
            add_special=True in wants_special or (body.prompt is not None and False not in wants_special),
            parse_special=body.parse_special is not False,
        )
    answer: TokensBody = {"tokens": found}
    if body.prompt is not None or "messages" in incoming.fields:
        answer |= {"count": len(found), "max_model_len": model.context_tokens}
    if body.with_pieces:
        answer["tokens"] = [_piece(token, model.token_texts) for token in found]
    return answer


def content_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the text of tokens; raises ApiError."""
    body = parse_body(DetokenizeBody, dict(incoming.fields), {})
    model = context.find_model(body.model)
    check_token_ids(body.tokens or (), model.vocab_size, "tokens")
    text = model.token_texts.text(body.tokens or ())
    answer: ContentBody = {"content": text, "prompt": text}
    return answer


def _piece(token: int, texts: TokenReader) -> TokenPiece:
    piece = texts.piece(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}
