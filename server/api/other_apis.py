"""Names the API that a path belongs to which is not served here, so that people learn why their client fails.

One table: a path that comes to be served loses its place in it. Pure.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class OtherApi:
    """An API, and the first segments of its paths, without `/v1`."""

    name: str
    paths: tuple[str, ...]


_OF_AGENTS = (
    "agents",
    "deployments",
    "deployment_runs",
    "dreams",
    "environments",
    "memory_stores",
    "tunnels",
    "vaults",
)

OTHER_APIS = (
    OtherApi("Anthropic's Text Completions API", ("complete",)),
    OtherApi("Anthropic's Message Batches API", ("messages/batches",)),
    OtherApi("OpenAI's audio API", ("audio",)),
    OtherApi("OpenAI's images API", ("images",)),
    OtherApi("OpenAI's videos API", ("videos",)),
    OtherApi("OpenAI's moderations", ("moderations",)),
    OtherApi("the files of OpenAI's and Anthropic's APIs", ("files",)),
    OtherApi("the skills of OpenAI's and Anthropic's APIs", ("skills",)),
    OtherApi("OpenAI's uploads and stores of files", ("uploads", "vector_stores", "containers")),
    OtherApi("the compaction of OpenAI's Responses API", ("responses/compact",)),
    OtherApi("OpenAI's batches", ("batches",)),
    OtherApi("OpenAI's fine-tuning", ("fine_tuning",)),
    OtherApi("OpenAI's Assistants API", ("assistants", "threads")),
    OtherApi("OpenAI's Realtime API", ("realtime", "live")),
    OtherApi("OpenAI's evals", ("evals",)),
    OtherApi("OpenAI's ChatKit", ("chatkit",)),
    OtherApi(
        "the part of OpenAI's API that is about its own platform",
        ("content_provenance_checks", "decisions", "safety", "webhook_endpoints", "webhook_event_types"),
    ),
    OtherApi("the agents that OpenAI and Anthropic run themselves", _OF_AGENTS),
    OtherApi("the accounts at OpenAI and Anthropic", ("organization", "organizations", "projects", "user_profiles")),
    OtherApi("Azure OpenAI", ("openai/deployments",)),
    OtherApi(
        "the rest of LM Studio's own API",
        ("api/v0", "api/v1/chat", "api/v1/models/load", "api/v1/models/unload", "api/v1/models/download"),
    ),
    OtherApi(
        "the part of Ollama's API that gives models to others, or takes files",
        ("api/push", "api/blobs"),
    ),
    OtherApi("Ollama's accounts and web search", ("api/me", "api/signout", "api/web_search", "api/web_fetch")),
    OtherApi("Google's Gemini API", ("v1beta",)),
    OtherApi("llama.cpp's infilling", ("infill",)),
    OtherApi("llama.cpp's adapters and embeddings", ("lora-adapters", "embedding")),
    OtherApi("text-generation-inference's own API", ("generate", "generate_stream")),
    OtherApi("a scoring API", ("reranking", "score")),
)
"""The first match counts, so narrower paths stand before wider ones."""


def find_other_api(path: str) -> OtherApi | None:
    """Returns the API that has `path`, with or without `/v1`; None for a path that is no API's."""
    asked = path.strip("/").removeprefix("v1/")
    for api in OTHER_APIS:
        if any(asked == known or asked.startswith(f"{known}/") for known in api.paths):
            return api
    return None


def explain_unknown_path(method: str, path: str) -> str:
    """Returns one sentence for a path that is not served: which API it is of, or how the address is to be mended."""
    said = f"there is no {method} {path[:200]} here"
    api = find_other_api(path)
    if api is not None:
        return f"{said}: it belongs to {api.name}, which this server does not have"
    if path.startswith("/v1/v1/"):
        return f"{said}: the client adds /v1 itself, so leave it out of the address that it is given"
    return said
