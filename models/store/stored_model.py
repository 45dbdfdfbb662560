"""A model under a local name: where its weights are, and its defaults for requests. Pure."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Literal

from models.errors import InvalidParameter, StoreError
from models.inference.sampling_params import SamplingParams, check

_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty", "repeat_last_n")
SAMPLING_DEFAULTS: Mapping[str, type] = {
    name: int if name in ("top_k", "seed", "repeat_last_n") else float
    for name in ("temperature", "top_k", "top_p", "min_p", "typical_p", "seed", *_PENALTIES)
}
_OF_LOADING = (
    "num_batch num_gpu main_gpu num_thread num_keep use_mmap use_mlock numa low_vram f16_kv logits_all vocab_only "
    "embedding_only tfs_z mirostat mirostat_tau mirostat_eta penalize_newline draft_num_predict"
)
WITHOUT_EFFECT = frozenset(_OF_LOADING.split())
"""Ollama's parameters that take none here."""
MIN_CONTEXT_TOKENS = 16
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 1024
_ANY_VOCABULARY = 2**31
_SYSTEM_ROLES = ("system", "developer")


@dataclass(frozen=True)
class ExampleMessage:
    """A message before each conversation's own."""

    role: str
    content: str


@dataclass(frozen=True)
class ModelDefaults:
    """Defaults; a request's own values take precedence."""

    system: str = ""
    messages: tuple[ExampleMessage, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    max_tokens: int | None = None
    """Longest answer; None: the server's limit."""
    context_tokens: int | None = None
    """Longest prompt and answer; None: the limit of model and server."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    """As `chat_template_kwargs` of a request."""

    def check(self) -> None:
        """Raises InvalidParameter for the first value that cannot be honoured."""
        check(self.sampling_over(SamplingParams()), _ANY_VOCABULARY)
        if len(self.stop) > MAX_STOP_STRINGS or not all(0 < len(text) <= MAX_STOP_CHARACTERS for text in self.stop):
            message = f"stop: at most {MAX_STOP_STRINGS} texts of 1 to {MAX_STOP_CHARACTERS} characters"
            raise InvalidParameter("stop", message)
        limits = {"num_predict": (self.max_tokens, 1), "num_ctx": (self.context_tokens, MIN_CONTEXT_TOKENS)}
        for name, (value, least) in limits.items():
            if value is not None and value < least:
                raise InvalidParameter(name, f"{name} must be at least {least}, not {value}")

    def sampling_over(self, sampling: SamplingParams) -> SamplingParams:
        """`sampling` overridden by these defaults; raises InvalidParameter."""
        unknown = next((name for name in self.sampling if name not in SAMPLING_DEFAULTS), None)
        if unknown is not None:
            raise InvalidParameter(unknown, f"{unknown} is no parameter of sampling that a model may set")
        return replace(sampling, **self.sampling)

    def conversation(self, messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
        """Messages after the examples, with the system prompt if they have none."""
        own = messages[:1] if messages and messages[0].get("role") in _SYSTEM_ROLES else messages[:0]
        system = () if own or not self.system else (ExampleMessage("system", self.system),)
        told = (*system, *self.messages)
        shown = [{"role": one.role, "content": [{"type": "text", "text": one.content}]} for one in told]
        return [*own, *shown, *messages[len(own) :]]


LATEST = "latest"
"""The tag of a name without one. A name holds no slash, unlike paths and repositories."""
MAX_NAME_CHARACTERS = 80
_PART = rf"[a-z0-9][a-z0-9._-]{{0,{MAX_NAME_CHARACTERS - 1}}}"
_NAME = re.compile(rf"({_PART})(?::({_PART}))?")


@dataclass(frozen=True)
class WeightsPlace:
    """Where a stored model's weights are."""

    kind: Literal["built-in", "repository", "folder"]
    name: str
    commit: str = ""

    def __str__(self) -> str:
        return f"{self.name}@{self.commit}" if self.commit else self.name


@dataclass(frozen=True)
class StoredModel:
    """One name of the manifest."""

    name: str
    """`name:tag`, lower case."""
    weights: WeightsPlace
    created: datetime
    modified: datetime
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    license: str = ""

    @property
    def short_name(self) -> str:
        return self.name.removesuffix(f":{LATEST}")


def find_full_name(text: str) -> str | None:
    """`name:tag` in lower case; None for what names no stored model."""
    match = _NAME.fullmatch(text.lower()) if text.isascii() else None
    return None if match is None else f"{match[1]}:{match[2] or LATEST}"


def parse_full_name(text: str) -> str:
    """`name:tag` in lower case; raises StoreError."""
    name = find_full_name(text)
    if name is None:
        raise StoreError(
            f"{text[:MAX_NAME_CHARACTERS]!r} is no name for a model: it is letters, digits and any of . _ - with at "
            f"most {MAX_NAME_CHARACTERS} characters, and a tag behind a colon if you like, such as writer:v2"
        )
    return name
