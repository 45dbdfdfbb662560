"""The paths of llama.cpp's dialect."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.llama_cpp.completion import LlamaCompletion, LlamaCompletionBody, complete
from server.api.llama_cpp.dialect import LlamaCppDialect, LlamaCppErrorBody
from server.api.llama_cpp.state import PropsBody, SlotBody, props, slots
from server.api.llama_cpp.template import InputTokensBody, TemplateText, apply_template, count_input_tokens
from server.api.llama_cpp.tokens import ContentBody, DetokenizeBody, TokenizeBody, TokensBody, detokenize, tokenize
from server.api.openai.chat_types import ChatBody
from server.api.openapi import Operation, Operations
from server.api.versioned import with_and_without_v1

_ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/completion", complete, methods=["POST"]),
    Route("/slots", slots, methods=["GET"]),
    Route("/props", props, methods=["GET"]),
    *with_and_without_v1([Route("/chat/completions/input_tokens", count_input_tokens, methods=["POST"])]),
)
_OPERATIONS: Operations = {
    tokenize: Operation(TokenizeBody, TokensBody),
    detokenize: Operation(DetokenizeBody, ContentBody),
    apply_template: Operation(ChatBody, TemplateText),
    complete: Operation(LlamaCompletionBody, LlamaCompletion, stream=LlamaCompletion),
    slots: Operation(answer=list[SlotBody], query=("model", "fail_on_no_slot")),
    props: Operation(answer=PropsBody, query=("model",)),
    count_input_tokens: Operation(ChatBody, InputTokensBody),
}
LLAMA_CPP = Api(
    LlamaCppDialect(),
    _ROUTES,
    _OPERATIONS,
    LlamaCppErrorBody,
    own_paths=("/slots", "/infill", "/lora-adapters", "/embedding"),
)
