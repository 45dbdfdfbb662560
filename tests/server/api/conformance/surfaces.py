"""One adapter for each endpoint that generates: how it is asked, and where its answers hold what all of them tell."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

HI: list[Mapping[str, Any]] = [{"role": "user", "content": "Hi"}]


class Told(NamedTuple):
    """What every dialect tells of an answer."""

    text: str
    finish: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


class Surface:
    """OpenAI's chat, and what the others have in common with it."""

    path = "/v1/chat/completions"
    body: Mapping[str, Any] = {"messages": HI}
    """The smallest body that is served, whole."""
    prompt = "messages"
    """The field that a prompt is refused by."""
    limit = "max_tokens"
    streams: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
    reasons = ("stop", "length")
    """What it says of an answer that ended by itself, and of one that met its limit."""
    key = "authorization", "Bearer "
    media_type = "text/event-stream; charset=utf-8"

    def limited(self, num_tokens: float) -> dict[str, Any]:
        """The fields that limit the answer."""
        return {self.limit: num_tokens}

    def told(self, answer: Any) -> Told:
        """Reads a whole answer."""
        [choice], usage = answer["choices"], answer["usage"]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return Told(text, choice["finish_reason"], usage["prompt_tokens"], cached, usage["completion_tokens"])

    def payloads(self, text: str) -> list[Any]:
        """The events of a stream; fails for a line that is none."""
        frames = [frame.splitlines()[-1] for frame in text.split("\n\n") if frame]
        events = [frame.removeprefix("data: ") for frame in frames if not frame.startswith(":")]
        return [event if event == "[DONE]" else json.loads(event) for event in events]

    def streamed(self, events: list[Any]) -> Told:
        """Reads a stream that has ended as it should."""
        *chunks, last, done = events
        assert (last["choices"], done) == ([], "[DONE]")
        deltas = [chunk["choices"][0] for chunk in chunks]
        text = "".join(each["text"] if "text" in each else each["delta"].get("content", "") for each in deltas)
        return self.told({**last, "choices": [{**deltas[-1], "text": text}]})

    def error(self, answer: Any) -> str:
        """The message of an error, whose shape is looked at."""
        assert set(answer["error"]) == {"message", "type", "param", "code"}
        return str(answer["error"]["message"])


class Text(Surface):
    path = "/v1/completions"
    body: Mapping[str, Any] = {"prompt": "Hi"}
    prompt = "prompt"


class Responses(Surface):
    path = "/v1/responses"
    body: Mapping[str, Any] = {"input": "Hi"}
    prompt = "input"
    limit = "max_output_tokens"
    streams: Mapping[str, Any] = {"stream": True}
    reasons = ("completed", "incomplete")

    def told(self, answer: Any) -> Told:
        [message], usage = answer["output"], answer["usage"]
        text = "".join(part["text"] for part in message["content"])
        cached = usage["input_tokens_details"]["cached_tokens"]
        return Told(text, answer["status"], usage["input_tokens"], cached, usage["output_tokens"])

    def streamed(self, events: list[Any]) -> Told:
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told = self.told(events[-1]["response"])
        assert (told.text, events[-1]["type"]) == (text, f"response.{told.finish}")
        return told

    def error(self, answer: Any) -> str:
        if answer.get("type") == "response.failed":
            return str(answer["response"]["error"]["message"])
        return super().error(answer)


class Messages(Surface):
    path = "/v1/messages"
    body: Mapping[str, Any] = {"messages": HI, "max_tokens": 50}
    streams: Mapping[str, Any] = {"stream": True}
    reasons = ("end_turn", "max_tokens")
    key = "x-api-key", ""

    def told(self, answer: Any) -> Told:
        usage = answer["usage"]
        read = usage["cache_read_input_tokens"]
        text = "".join(block["text"] for block in answer["content"])
        prompt = usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
        return Told(text, answer["stop_reason"], prompt, read, usage["output_tokens"])

    def streamed(self, events: list[Any]) -> Told:
        *events, last, stop = (event for event in events if event["type"] != "ping")
        assert (last["type"], stop) == ("message_delta", {"type": "message_stop"})
        texts = [event["delta"] for event in events if event["type"] == "content_block_delta"]
        return self.told({"content": texts, "stop_reason": last["delta"]["stop_reason"], "usage": last["usage"]})

    def error(self, answer: Any) -> str:
        assert (answer["type"], set(answer["error"])) == ("error", {"type", "message", "details"})
        return str(answer["error"]["message"])


class OllamaChat(Surface):
    path = "/api/chat"
    body: Mapping[str, Any] = {"model": "tiny", "messages": HI, "stream": False}
    streams: Mapping[str, Any] = {"stream": None}
    media_type = "application/x-ndjson"

    def limited(self, num_tokens: float) -> dict[str, Any]:
        return {"options": {"num_predict": num_tokens}}

    def told(self, answer: Any) -> Told:
        text = answer["response"] if "response" in answer else answer["message"]["content"]
        counts = answer["prompt_eval_count"], answer["cache"]["hit_tokens"], answer["eval_count"]
        assert answer["done"]
        return Told(text, answer["done_reason"], *counts)

    def payloads(self, text: str) -> list[Any]:
        return [json.loads(line) for line in text.splitlines()]

    def streamed(self, events: list[Any]) -> Told:
        *parts, last = events
        assert not any(part["done"] for part in parts)
        text = "".join(part["response"] if "response" in part else part["message"]["content"] for part in parts)
        told = self.told(last)
        assert told.text == ""
        return told._replace(text=text)

    def error(self, answer: Any) -> str:
        assert set(answer) == {"error"}
        return str(answer["error"])


class OllamaGenerate(OllamaChat):
    path = "/api/generate"
    body: Mapping[str, Any] = {"model": "tiny", "prompt": "Hi", "stream": False}
    prompt = "prompt"


class LlamaCompletion(Surface):
    path = "/completion"
    body: Mapping[str, Any] = {"prompt": "Hi"}
    prompt = "prompt"
    limit = "n_predict"
    streams: Mapping[str, Any] = {"stream": True}
    reasons = ("eos", "limit")

    def told(self, answer: Any) -> Told:
        counts = answer["tokens_evaluated"], answer["tokens_cached"], answer["tokens_predicted"]
        return Told(answer["content"], answer["stop_type"], *counts)

    def streamed(self, events: list[Any]) -> Told:
        *parts, last = events
        assert last["stop"] and not any(part["stop"] for part in parts)
        return self.told({**last, "content": "".join(part["content"] for part in parts)})

    def error(self, answer: Any) -> str:
        assert set(answer["error"]) == {"code", "message", "type"}
        return str(answer["error"]["message"])


SURFACES = (Surface(), Text(), Responses(), Messages(), OllamaChat(), OllamaGenerate(), LlamaCompletion())
