"""LiteLLM, as an OpenAI-compatible provider: a chat, a stream, a tool that must be called, and a schema."""

import json
import os

import litellm

TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Lisbon", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}

litellm.telemetry = False
common = {"model": "openai/demo", "api_base": f"{os.environ['BASE_URL']}/v1", "api_key": "none", "max_tokens": 200}
asked = [{"role": "user", "content": "What is the weather in Oslo?"}]
assert litellm.completion(messages=asked, **common).choices[0].message.content
chunks = list(litellm.completion(messages=asked, stream=True, **common))
assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
called = litellm.completion(messages=asked, tools=[TOOL], tool_choice="required", **common)
function = called.choices[0].message.tool_calls[0].function
assert function.name == "get_weather"
assert "city" in json.loads(function.arguments)
schema = {"type": "json_schema", "json_schema": {"name": "city", "schema": SCHEMA, "strict": True}}
bound = litellm.completion(messages=asked, response_format=schema, **common)
assert json.loads(bound.choices[0].message.content)["city"] in ("Lisbon", "Oslo")
