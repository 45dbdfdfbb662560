"""The paths of llama.cpp's dialect."""

from starlette.routing import Route

from server.api.dialect import Api
from server.api.llama_cpp.dialect import LlamaCppDialect
from server.api.llama_cpp.state import props, slots
from server.api.llama_cpp.template import apply_template, count_input_tokens
from server.api.llama_cpp.tokens import detokenize, tokenize
from server.api.versioned import with_and_without_v1

_ROUTES = (
    Route("/tokenize", tokenize, methods=["POST"]),
    Route("/detokenize", detokenize, methods=["POST"]),
    Route("/apply-template", apply_template, methods=["POST"]),
    Route("/slots", slots, methods=["GET"]),
    Route("/props", props, methods=["GET"]),
    *with_and_without_v1([Route("/chat/completions/input_tokens", count_input_tokens, methods=["POST"])]),
)
LLAMA_CPP = Api(
    LlamaCppDialect(), _ROUTES, own_paths=("/slots", "/completion", "/infill", "/lora-adapters", "/embedding")
)
