"""Valid requests of every dialect, from which the fuzzer makes others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_TOKENS = 12
_FUNCTION = {"name": "get_weather", "description": "Tells the weather.", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer", "minimum": 1}},
    "required": ["city"],
}}  # fmt: skip
_TOOL = {"type": "function", "function": _FUNCTION}
_SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}
_CHAT = [
    {"role": "system", "content": "You are helpful."},
    {"role": "user", "content": "My name is Ada and I live in Paris."},
    {"role": "assistant", "content": "Nice to meet you, Ada!"},
    {"role": "user", "content": [{"type": "text", "text": "What is my name?"}]},
]
_CALLED = [
    {"role": "user", "content": "What is the weather in Paris?"},
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Paris"}'}}
    ]},
    {"role": "tool", "tool_call_id": "call_1", "content": "Sunny."},
]  # fmt: skip
_SAMPLED = {
    "max_tokens": MAX_TOKENS, "temperature": 0.7, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "seed": 3,
    "typical_p": 0.9, "top_n_sigma": 2, "xtc_probability": 0.5, "xtc_threshold": 0.1, "repeat_last_n": 20,
    "dry_multiplier": 0.8, "dry_base": 1.75, "dry_allowed_length": 2, "dry_penalty_last_n": 50,
    "dry_sequence_breakers": ["\n", "Bob"], "bad_words": ["Mallory", "Oscar"],
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "repetition_penalty": 1.1, "logit_bias": {"5": 1},
    "stop": ["Bob", "Eve"], "session_id": "one", "cache_salt": "salt", "metadata": {"user_id": "u"},
}  # fmt: skip
_BLOCKS = [
    {"role": "user", "content": [{"type": "text", "text": "Weather?", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Look.", "signature": "x"},
        {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Paris"}},
    ]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "Sunny."}]},
]  # fmt: skip
_ITEMS = [
    {"type": "message", "role": "developer", "content": [{"type": "input_text", "text": "Be brief."}]},
    {"type": "message", "role": "user", "content": "Weather in Paris?"},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Look."}]},
    {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "call_1", "output": "Sunny."},
]


@dataclass(frozen=True)
class Example:
    """A request that the server answers, or refuses for what it does not hold."""

    method: str
    path: str
    body: Mapping[str, Any] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)


def _post(path: str, **body: Any) -> Example:
    return Example("POST", path, body)


_ANTHROPIC = {"anthropic-version": "2023-06-01", "x-api-key": "none"}
_OPENAI = (
    _post("/v1/chat/completions", model="demo", messages=_CHAT, stream=True, **_SAMPLED),
    _post("/v1/chat/completions", model="demo", messages=_CALLED, tools=[_TOOL], max_tokens=MAX_TOKENS),
    _post("/v1/chat/completions", messages=_CHAT, tools=[_TOOL], tool_choice="required", max_tokens=MAX_TOKENS),
    _post(
        "/v1/chat/completions",
        messages=_CHAT,
        max_tokens=MAX_TOKENS,
        response_format={"type": "json_schema", "json_schema": {"name": "p", "schema": _SCHEMA, "strict": True}},
    ),
    _post("/v1/chat/completions", messages=_CHAT, max_tokens=MAX_TOKENS, guided_regex="[a-c]{2,5}"),
    _post("/v1/chat/completions", messages=_CHAT, max_tokens=MAX_TOKENS, grammar='root ::= "yes" | "no"'),
    _post(
        "/v1/chat/completions",
        messages=_CHAT,
        stream=True,
        stream_options={"include_usage": True},
        logprobs=True,
        top_logprobs=2,
        n=2,
        reasoning_effort="low",
        chat_template_kwargs={"enable_thinking": False},
        max_completion_tokens=MAX_TOKENS,
    ),
    _post("/v1/completions", prompt="The capital of France is", **_SAMPLED),
    _post("/v1/completions", prompt=["One", "Two"], echo=True, logprobs=1, max_tokens=2, suffix="x"),
    _post("/v1/completions", prompt=[5, 6, 7], max_tokens=2, stream=True),
    _post("/v1/embeddings", input=["One", "Two"], dimensions=8, encoding_format="base64"),
    _post("/v1/rerank", query="One", documents=["Two", {"text": "Three"}], top_n=1, return_documents=True),
    Example("GET", "/v1/models"),
    Example("GET", "/v1/models/demo"),
    _post(
        "/v1/systemone", state={"mail": "Hi"}, questions={"q": {"type": "choice", "criteria": {"a": None, "ab": "b"}}}
    ),
    _post("/v1/decisions", input="Hi", questions=[{"type": "predicate", "name": "q", "instructions": "Is it?"}]),
)
_RESPONSES = (
    _post("/v1/responses", input="What is my name?", max_output_tokens=MAX_TOKENS, stream=True),
    _post(
        "/v1/responses",
        model="demo",
        input=_ITEMS,
        instructions="Be kind.",
        tools=[{"type": "function", **_FUNCTION}, {"type": "custom", "name": "patch"}],
        reasoning={"effort": "low", "summary": "auto"},
        include=["reasoning.encrypted_content"],
        metadata={"a": "b"},
        max_output_tokens=MAX_TOKENS,
    ),
    _post(
        "/v1/responses",
        input="Who?",
        text={"format": {"type": "json_schema", "name": "p", "schema": _SCHEMA}},
        previous_response_id="resp_1",
        conversation={"id": "conv_1"},
        store=False,
        max_output_tokens=MAX_TOKENS,
    ),
    _post("/v1/responses/input_tokens", input=_ITEMS),
    Example("GET", "/v1/responses/resp_1?include[]=x"),
    Example("DELETE", "/v1/responses/resp_1"),
    _post("/v1/responses/resp_1/cancel"),
    Example("GET", "/v1/responses/resp_1/input_items?limit=2&order=asc&after=x"),
    _post("/v1/conversations", items=_ITEMS[:2], metadata={"topic": "x"}),
    Example("GET", "/v1/conversations/conv_1"),
    _post("/v1/conversations/conv_1", metadata={"topic": "y"}),
    Example("DELETE", "/v1/conversations/conv_1"),
    Example("GET", "/v1/conversations/conv_1/items?limit=1"),
    _post("/v1/conversations/conv_1/items", items=_ITEMS[:2]),
    Example("GET", "/v1/conversations/conv_1/items/item_1"),
    Example("DELETE", "/v1/conversations/conv_1/items/item_1"),
)
_MESSAGES = (
    Example("POST", "/v1/messages", {
        "model": "demo", "max_tokens": MAX_TOKENS, "messages": _BLOCKS, "system": [{"type": "text", "text": "Hi."}],
        "tools": [{"name": "get_weather", "input_schema": _SCHEMA}], "tool_choice": {"type": "auto"},
        "thinking": {"type": "enabled", "budget_tokens": 1024}, "stop_sequences": ["x"], "stream": True,
        "metadata": {"user_id": "u_session_1"}, "output_config": {"effort": "low"},
    }, _ANTHROPIC),
    Example("POST", "/v1/messages", {
        "model": "demo", "max_tokens": MAX_TOKENS, "messages": [{"role": "user",
    "content": "Hi"}], "temperature": 0,
    }, _ANTHROPIC),
    Example("POST", "/v1/messages/count_tokens", {"model": "demo", "messages": _BLOCKS}, _ANTHROPIC),
    Example("GET", "/v1/models", headers=_ANTHROPIC),
)  # fmt: skip
_OPTIONS = {"num_predict": MAX_TOKENS, "temperature": 0.5, "top_k": 5, "seed": 4, "stop": ["x"], "num_ctx": 64}
_OLLAMA = (
    _post("/api/chat", model="demo", messages=_CHAT[:3], options=_OPTIONS, keep_alive="5m"),
    _post("/api/chat", model="demo", messages=[{"role": "user", "content": "Hi"}], tools=[_TOOL], stream=False),
    _post("/api/chat", model="demo", messages=_CHAT[1:2], format=_SCHEMA, think=False, options=_OPTIONS),
    _post("/api/embed", model="demo", input=["One", "Two"], truncate=True, dimensions=8, keep_alive="5m"),
    _post("/api/embeddings", model="demo", prompt="One", options={}),
    _post("/api/generate", model="demo", prompt="Hi", system="Be kind.", options=_OPTIONS, context=[5, 6]),
    _post("/api/generate", model="demo", prompt="Hi", raw=True, stream=False, suffix="x", options=_OPTIONS),
    _post("/api/show", model="demo", verbose=True),
    Example("GET", "/api/tags"),
    Example("GET", "/api/ps"),
    Example("GET", "/api/version"),
    _post("/api/pull", model="demo"),
    _post(
        "/api/create",
        **{"from": "demo"},
        model="demo",
        system="Be kind.",
        parameters=_OPTIONS,
        messages=[],
        stream=False,
    ),
    _post("/api/copy", source="demo", destination="demo"),
    Example("DELETE", "/api/delete", {"model": "demo"}),
    _post("/api/embed", model="demo", input="x"),
    Example("GET", "/"),
)
_LLAMA_CPP = (
    _post("/tokenize", content="Hello", add_special=True, with_pieces=True, parse_special=False),
    _post("/detokenize", tokens=[5, 6, 7]),
    _post("/apply-template", messages=_CHAT),
    _post("/v1/chat/completions/input_tokens", messages=_CHAT, tools=[_TOOL]),
    Example("GET", "/slots?fail_on_no_slot=1"),
    Example("GET", "/props"),
    _post("/completion", prompt="x", n_predict=2),
    _post("/infill", input_prefix="x"),
)
_ADMIN = (
    Example("GET", "/v1/cache?limit=5&cache_salt=salt"),
    Example("GET", "/v1/cache/edges/1?cache_salt=salt"),
    Example("GET", "/v1/cache/search?text=a"),
    Example("GET", "/v1/cache/export?session=one"),
    Example("POST", "/v1/cache/import"),
    Example("GET", "/v1/requests"),
    Example("GET", "/v1/stats"),
    Example("GET", "/v1/events?seconds=0"),
    _post("/v1/cache/clear"),
    Example("GET", "/v1/library"),
    Example("DELETE", "/v1/models/nobody"),
    _post("/v1/models/load", model="nobody"),
    _post("/v1/models/unload", model="nobody"),
    _post("/v1/cache/prime", messages=_CHAT, tools=[_TOOL], session_id="one"),
    Example("GET", "/v1/sessions"),
    Example("GET", "/v1/sessions/one?cache_salt=salt"),
    Example("DELETE", "/v1/sessions/one?cache_salt=salt"),
    _post("/v1/sessions/one/pin"),
    _post("/v1/sessions/one/unpin"),
    Example("GET", "/openapi.json"),
    Example("GET", "/metrics"),
    Example("GET", "/health"),
    Example("GET", "/ping"),
    Example("GET", "/version"),
    Example("GET", "/api/v1/models"),
    Example("GET", "/ready"),
    _post("/v1/embeddings", input="x"),
    _post("/v1/audio/speech", input="x"),
)
EXAMPLES = (*_OPENAI, *_RESPONSES, *_MESSAGES, *_OLLAMA, *_LLAMA_CPP, *_ADMIN)
"""At least one for every path that `/openapi.json` has under `/v1`, `/api` and by itself; a test compares."""
