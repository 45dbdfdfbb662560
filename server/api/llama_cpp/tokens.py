"""`POST /tokenize` and `/detokenize`: text to tokens and back, without asking the model."""

from typing import TypedDict

from starlette.requests import Request
from starlette.responses import Response

from server.api.context import ApiContext, TokenReader
from server.api.dialect import Payload
from server.api.endpoint import inspect
from server.api.params import Incoming, check_token_ids
from server.api.typed_body import BodyModel, parse_body


class TokenizeBody(BodyModel):
    """Body of `POST /tokenize`."""

    model: str | None = None
    content: str | None = None
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
    """The tokens of a text."""

    tokens: list[int] | list[TokenPiece]


class ContentBody(TypedDict):
    """The text of tokens."""

    content: str


async def tokenize(request: Request) -> Response:
    """Answers with the tokens of a text."""
    return await inspect(request, tokens_of)


async def detokenize(request: Request) -> Response:
    """Answers with the text of tokens."""
    return await inspect(request, content_of)


def tokens_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the tokens of a text; raises ApiError."""
    body = parse_body(TokenizeBody, dict(incoming.fields), {})
    model = context.find_model(body.model)
    found = model.renderer.tokenize(
        body.content or "",
        add_special=body.add_special is True,
        parse_special=body.parse_special is not False,
    )
    answer: TokensBody = {"tokens": found}
    if body.with_pieces:
        answer["tokens"] = [_piece(token, model.token_texts) for token in found]
    return answer


def content_of(context: ApiContext, incoming: Incoming) -> Payload:
    """Returns the text of tokens; raises ApiError."""
    body = parse_body(DetokenizeBody, dict(incoming.fields), {})
    model = context.find_model(body.model)
    check_token_ids(body.tokens or (), model.vocab_size, "tokens")
    answer: ContentBody = {"content": model.token_texts.text(body.tokens or ())}
    return answer


def _piece(token: int, texts: TokenReader) -> TokenPiece:
    piece = texts.piece(token)
    try:
        return {"id": token, "piece": piece.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(piece)}
