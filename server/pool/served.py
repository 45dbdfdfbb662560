"""What is served: a model, its formats and defaults.

Knows no HTTP, no client and not which models are loaded.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from models.adapter import NO_ADAPTER, Adapter, state_namespace
from models.formats import EmbeddingFormat, Judgement
from models.inference.sampling_params import SamplingParams
from models.output.call_formats import HARMONY, CallFormat
from models.output.call_reader import CallReader, HarmonyReader
from models.output.detokenizer import Detokenizer, token_search
from models.output.pieces import OutputParser, ReasoningFormat, ReasoningParser, Thinking
from models.prompt.chat_template import ChatRenderer
from models.store.stored_model import ModelDefaults

if TYPE_CHECKING:
    from models.inference.grammar import GrammarCompiler
    from models.vision.loading import Vision


@dataclass(frozen=True)
class ModelFacts:
    """Facts for people, which never change an answer. Unknown ones are empty or 0."""

    architecture: str = ""
    """Such as `qwen3`."""
    fingerprint: str = ""
    num_parameters: int = 0
    stored_bytes: int = 0
    memory_bytes: int = 0
    is_on_gpu: bool = False
    weight_format: str = ""
    """Such as `4-bit` or `BF16`."""
    num_layers: int = 0
    hidden_size: int = 0
    chat_template: str = ""
    bos_token: str = ""
    eos_token: str = ""


def architecture_facts(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`ModelFacts` from a model's `config.json`."""
    inner = {**config, **(config.get("text_config") or {})}
    quantization = config.get("quantization") or {}
    bits = quantization.get("bits") if isinstance(quantization, dict) else None
    stored_type = str(inner.get("dtype") or inner.get("torch_dtype") or "")
    short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}.get(stored_type, "")
    sizes = {"num_layers": inner.get("num_hidden_layers"), "hidden_size": inner.get("hidden_size")}
    return {
        "architecture": str(config.get("model_type") or ""),
        "weight_format": f"{bits}-bit" if isinstance(bits, int) else short,
        **{name: size for name, size in sizes.items() if isinstance(size, int)},
    }


MAX_PREVIEW_CHARACTERS = 80
MAX_PREVIEWS = 16_384


@dataclass(frozen=True, eq=False)
class ListedModel:
    """A model that requests may name, and known facts."""

    id: str
    created: int = 0
    """Seconds since 1970."""
    context_tokens: int | None = None
    """The most tokens of prompt and answer together, by model and configuration."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    parent_id: str | None = None
    has_tower: bool = False
    """Known of an unloaded model by its files."""

    @property
    def capabilities(self) -> tuple[str, ...]:
        """What requests may ask for, in Ollama's words; of an unloaded model what its files tell."""
        return "completion", *(["vision"] if self.has_tower else [])


@dataclass(frozen=True, eq=False, kw_only=True)
class ServedModel(ListedModel):
    """One loaded model as clients see it."""

    context_tokens: int
    renderer: ChatRenderer
    token_texts: Detokenizer
    vocab_size: int
    call_format: CallFormat | None = None
    """None: calls stay text."""
    reasoning_format: ReasoningFormat | None = None
    """None: the model has none, or reasoning stays text."""
    opens_reasoning: bool = False
    """The template opens reasoning on request, so a prompt without one asks for none."""
    grammars: "GrammarCompiler | None" = None
    """None if answers cannot be bound."""
    embedding: EmbeddingFormat | None = field(default_factory=EmbeddingFormat)
    reranking: Judgement | None = None
    """Set if the model judges documents."""
    sampling: SamplingParams = field(default_factory=SamplingParams)
    """Defaults for fields missing in a request."""
    vision: "Vision | None" = None
    """None if it sees no images."""
    adapter: Adapter | None = None
    """None for a base model."""
    defaults: ModelDefaults = field(default_factory=ModelDefaults)
    """Other defaults; sampling and context have their own fields."""

    def labelled(self, name: str, defaults: ModelDefaults) -> "ServedModel":
        """The model under another name, with its defaults; state is shared."""
        sampling = defaults.sampling_over(self.sampling)
        return replace(
            self,
            id=name,
            parent_id=self.id,
            defaults=defaults,
            context_tokens=min(self.context_tokens, defaults.context_tokens or self.context_tokens),
            sampling=replace(sampling, top_k=sampling.top_k if sampling.top_k < self.vocab_size else 0),
        )

    def variant(self, adapter: Adapter) -> "ServedModel":
        """The model under the adapter's name."""
        return replace(self, id=adapter.name, adapter=adapter, parent_id=self.id)

    @property
    def base_id(self) -> str:
        return self.id if self.parent_id is None else self.parent_id

    @property
    def adapter_index(self) -> int:
        return NO_ADAPTER if self.adapter is None else self.adapter.index

    def state_namespace(self, namespace: str) -> str:
        """Where the model's state is kept for a client's namespace."""
        return state_namespace(namespace, self.adapter)

    @cached_property
    def preview(self) -> Callable[[bytes], str]:
        """A text's beginning from its tokens' bytes. For any thread."""

        def text(tokens: bytes) -> str:
            return self.token_texts.text(np.frombuffer(tokens, np.int32).tolist())[:MAX_PREVIEW_CHARACTERS]

        return lru_cache(MAX_PREVIEWS)(text)

    @cached_property
    def tokens_containing(self) -> Callable[[str], tuple[int, ...]]:
        """The tokens that hold a text."""
        return token_search(self.token_texts.piece, self.vocab_size)

    @property
    def capabilities(self) -> tuple[str, ...]:
        """Without "tools" if calls would come as text."""
        can = {"vision": self.vision is not None, "tools": self.tool_calls == "parsed", "thinking": self.thinks}
        return "completion", *(name for name, is_there in can.items() if is_there)

    @property
    def thinks(self) -> bool:
        """Whether reasoning is told apart."""
        return self.reasoning_format is not None or self.call_format is HARMONY

    @property
    def tool_calls(self) -> Literal["parsed", "text", "none"]:
        """How calls are returned; "none" if the template takes no tools."""
        if not self.renderer.reads_tools:
            return "none"
        return "text" if self.call_format is None else "parsed"

    @property
    def can_forbid_calls(self) -> bool:
        """Whether calls of shown tools can be forbidden."""
        return self.call_format is not HARMONY and (self.call_format is None or self.grammars is not None)

    def thinking(self, prompt: str, max_tokens: int | None = None, begun: str = "") -> Thinking | None:
        """How reasoning is marked and limited; None if none is possible. `prompt` ends with `begun`."""
        if self.reasoning_format is None:
            return None
        is_open = self.reasoning_format.is_opened_by(prompt, begun)
        return Thinking(self.reasoning_format, is_open, max_tokens) if is_open or not begun else None

    def output_parser(
        self, tools: Sequence[Mapping[str, Any]], prompt: str = "", begun: str = "", *, is_forced: bool = False
    ) -> OutputParser:
        """The answer's parser; `prompt` ends with `begun`."""
        if self.call_format is HARMONY:
            return HarmonyReader(tools)
        answer, thought = OutputParser(), OutputParser()
        if tools and self.call_format is not None:
            answer = CallReader(self.call_format, tools, is_forced=is_forced)
            thought = CallReader(self.call_format, tools, in_thought=True)
        thinking = self.thinking(prompt, begun=begun)
        if thinking is None:
            return answer
        return ReasoningParser(thinking.reasoning_format, answer, thought, is_open=thinking.is_open)
