"""How every field of Ollama's endpoints, options and messages is treated.

Tests compare the tables with the types of the bodies and with docs/ollama.md. Ollama ignores unknown fields, and logs
a warning for unknown options; so does this server.
"""

from server.api.dialect import Rules, honoured, no_effect, refused

IN_BOTH: Rules = {
    **honoured("model stream format think options keep_alive"),
    **no_effect("a prompt that is too long is answered with an error, never cut", "truncate shift"),
    **no_effect("models here write text", "width height steps"),
    **refused("answers hold text, without data on single tokens", logprobs=(False,), top_logprobs=(0,)),
    **refused("a prompt is only shown with an answer to it", _debug_render_only=(False,)),
}
"""Fields of both generation endpoints."""

_OF_VECTORS: Rules = {
    **honoured("model keep_alive"),
    **no_effect("options are about answers, and vectors are none", "options"),
}

IN_EMBED: Rules = {**_OF_VECTORS, **honoured("input truncate dimensions")}
"""Fields of `POST /api/embed`."""

IN_EMBEDDING: Rules = {**_OF_VECTORS, **honoured("prompt")}
"""Fields of `POST /api/embeddings`."""

IN_PULL: Rules = {
    **honoured("model name stream"),
    **no_effect("the hub is asked as HF_ENDPOINT and HF_TOKEN say", "insecure username password"),
}
"""Fields of `POST /api/pull`."""

IN_CREATE: Rules = {
    **honoured("model name from modelfile system parameters messages license stream"),
    **refused("a model's template comes with its files, and is written in Jinja, not in Go", template=("",)),
    **refused("start the server with --adapter NAME=FOLDER to serve a LoRA adapter beside a model", adapters=({},)),
    **refused("weights stay as they are; pull a quantized model instead", quantize=("",), quantization=("",)),
    **refused("a model is pulled, or made from one that is here", files=({},), path=("",)),
}
"""Fields of `POST /api/create`."""

IN_COPY: Rules = honoured("source destination")
"""Fields of `POST /api/copy`."""

IN_DELETE: Rules = honoured("model name")
"""Fields of `DELETE /api/delete`."""

IN_CHAT: Rules = {**IN_BOTH, **honoured("messages tools")}
"""Fields of `POST /api/chat`."""

IN_GENERATE: Rules = {
    **IN_BOTH,
    **honoured("prompt system raw context"),
    **refused("no model here takes images, only text", images=([],)),
    **refused("no model here fills in what stands before a text", suffix=("",)),
    **refused("prompts are made by the model's own template; send a whole prompt with raw", template=("",)),
}
"""Fields of `POST /api/generate`."""

IN_MESSAGE: Rules = {
    **honoured("role content thinking tool_calls tool_name tool_call_id"),
    **refused("no model here takes images, only text", images=([],)),
}
"""Fields of one message of a conversation."""

IN_OPTIONS: Rules = {
    **honoured(
        """
        num_predict temperature top_k top_p min_p typical_p seed stop repeat_penalty presence_penalty
        frequency_penalty repeat_last_n
        """
    ),
    **no_effect("the context is as long as the server's, see --context", "num_ctx"),
    **no_effect("tokens are never shifted or dropped from the context", "num_keep"),
    **no_effect("it could only save time", "draft_num_predict"),
    **no_effect(
        "the model is loaded already",
        """
        num_batch num_gpu main_gpu num_thread use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only
        embedding_only
        """,
    ),
    **no_effect("Ollama itself no longer has it", "tfs_z mirostat mirostat_tau mirostat_eta penalize_newline"),
}
"""Fields of `options`."""
