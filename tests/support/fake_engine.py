"""A scriptable stand-in for the engine, and a model without weights, to test the HTTP side by itself.

The fake answers on the event loop it was asked on. Like the real engine it posts `Started`, `Progress`,
`Delta` and one last event per request, and stops within one step of a cancel. It keeps what it was asked, and
which requests were cancelled.
"""

import asyncio
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from cache.snapshots import RestorePoint, RestorePointKind
from cache.views import CacheView, StateBytes, Traced
from models.formats import Judgement, Reading
from models.output.call_formats import HERMES
from models.prompt.chat_template import ChatTemplateError, RenderedPrompt
from models.prompt.shapes import Message
from models.prompt.tool_definitions import ToolDefinitions
from server.diagnosis.causes import Miss, Reuse
from server.engine.commands import describe_cache, trace_prompts
from server.engine.engine import Engine
from server.engine.messages import Generation, Mailbox
from server.engine.request import (
    Delta,
    DraftSource,
    DraftStats,
    EngineStats,
    EngineStopped,
    Event,
    Failed,
    Finished,
    FinishReason,
    GenerationRequest,
    Progress,
    QueueFull,
    Started,
    Timings,
)
from server.pool.served import ServedModel

VOCAB_SIZE = 1024
DRAFTS = DraftStats(
    drafted={DraftSource.HISTORY: 90, DraftSource.PREDICTION: 10},
    accepted={DraftSource.HISTORY: 62, DraftSource.PREDICTION: 0},
    steps=20,
    tokens=85,
)
"""What an engine may have drafted."""


@dataclass(frozen=True)
class Script:
    """What the fake does with a request: texts one step apart, then the reason to end."""

    texts: tuple[str, ...] = ("Hello", " there", ".")
    reason: FinishReason = FinishReason.STOP
    hit_tokens: int = 0
    prefill_seconds: float = 0.0
    step_seconds: float = 0.0
    error: Exception | None = None
    """Raised in place of the end, after the texts."""
    stop_text: str | None = None
    stop_token: int | None = None
    is_loop: bool = False
    reasoning_tokens: int | None = None
    miss: Miss | None = None
    progress: tuple[int, ...] = ()
    """How much of the prompt is evaluated after each of its chunks but the last."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """All drafts are from the request's prediction, if it has one."""
    queue_seconds: float = 0.0
    """How long the request waits for a slot."""


def _direction(tokens: Any) -> Any:
    """A vector of length 1 in four dimensions: how often the tokens leave each rest."""
    counts = np.bincount(tokens % 4, minlength=4).astype(np.float32)
    return counts / np.linalg.norm(counts)


@dataclass(eq=False)
class FakeEngine(Engine):
    """An engine without a worker. `script` may be replaced at any time, or be a function of the request."""

    script: Script | Callable[[GenerationRequest], Script] = field(default_factory=Script)
    max_waiting: int | None = None
    """Requests that may run at once before QueueFull; None: any number."""
    is_running: bool = True
    requests: list[GenerationRequest] = field(default_factory=list)
    cancelled: set[str] = field(default_factory=set)
    finished: set[str] = field(default_factory=set)
    commands: list[tuple[Any, ...]] = field(default_factory=list)
    cancel_seen: threading.Event = field(default_factory=threading.Event)
    budget_bytes: int | None = None
    """What it was opened with, or given last by `try_resize`."""
    embedded: list[tuple[list[list[int]], Reading]] = field(default_factory=list)
    """The tokens of the texts of each request for vectors, and how they were to be pooled."""
    embedding_error: Exception | None = None
    """Raised in place of vectors."""
    excess_bytes: int = 0
    """What `try_resize` says that running requests hold beyond any budget."""
    drafts: DraftStats | None = None
    max_texts: int | None = None
    """Texts of a request's script after which it waits until this is raised, or None: no waiting."""

    def submit(self, request: GenerationRequest) -> Generation:
        if not self.is_running:
            raise EngineStopped("stopped")
        if request.is_idle_work:
            generation = Generation(partial(self._cancel, request.request_id), Mailbox(asyncio.get_running_loop()))
            self.idle_requests.append(request)
            generation.post([Failed(EngineStopped("nothing is ever idle here"))])
            return generation
        num_running = len(self.requests) - len(self.finished)
        if self.max_waiting is not None and num_running >= self.max_waiting:
            raise QueueFull(num_running, 7)
        self.requests.append(request)
        generation = Generation(partial(self._cancel, request.request_id), Mailbox(asyncio.get_running_loop()))
        script = self.script if isinstance(self.script, Script) else self.script(request)
        task = asyncio.get_running_loop().create_task(self._answer(request, script, generation))
        # The loop keeps only a weak hold on its tasks.
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return generation

    async def execute(self, command: Callable[..., Any], *given: Any) -> Any:
        if not self.is_running:
            raise EngineStopped("stopped")
        if command is describe_cache:
            return CacheView("", 0, 0, 0, StateBytes(), [], [], False, None, 0, 0, ())
        if command is trace_prompts:
            return [(Traced([], 0), Traced([], 0)) for _ in given[1]]
        self.commands.append((command, *given))
        return None

    async def embed(self, texts: Sequence[Any], reading: Reading, adapter: int = 0) -> list[Any]:
        if not self.is_running:
            raise EngineStopped("stopped")
        if self.embedding_error is not None:
            raise self.embedding_error
        self.embedded.append(([text.tolist() for text in texts], reading))
        if isinstance(reading, Judgement):
            return [np.array([1 / len(text)], np.float32) for text in texts]
        return [_direction(text) for text in texts]

    async def try_resize(self, budget_bytes: int) -> int:
        self.budget_bytes = budget_bytes
        return self.excess_bytes

    def watch(self, tell: Any) -> None:
        """Nothing happens to state here."""

    async def drain(self, timeout_seconds: float) -> bool:
        self.is_running = False
        return len(self.requests) == len(self.finished)

    def stop(self) -> None:
        self.is_running = False

    def begin_stop(self) -> None:
        """`stop` waits for nothing here."""

    def park(self) -> None:
        self.stop()

    def execute_later(self, command: Callable[..., Any], *given: Any) -> None:
        self.commands.append((command, *given))

    def stats(self) -> EngineStats:
        return EngineStats(num_open=len(self.requests) - len(self.finished), drafts=self.drafts)

    def __post_init__(self) -> None:
        self.idle_requests: list[GenerationRequest] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def _cancel(self, request_id: str) -> None:
        self.cancelled.add(request_id)
        self.cancel_seen.set()

    async def _answer(self, request: GenerationRequest, script: Script, generation: Generation) -> None:
        num_prompt = len(request.tokens)
        if script.queue_seconds:
            await self._pause(request, script.queue_seconds)
        generation.post([self._beginning(request, script)])
        if script.prefill_seconds:
            await self._pause(request, script.prefill_seconds)
        generation.post([Progress(done, num_prompt) for done in (*script.progress, num_prompt)])
        num_predicted = await self._say(request, script, generation)
        self.finished.add(request.request_id)
        generation.post([self._end(request, script, num_predicted)])

    async def _say(self, request: GenerationRequest, script: Script, generation: Generation) -> int:
        for count, text in enumerate(script.texts):
            if script.step_seconds:
                await self._pause(request, script.step_seconds)
            while self._is_held(count) and request.request_id not in self.cancelled:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            if request.request_id in self.cancelled:
                return count
            generation.post([Delta(text, (count,))])
        return len(script.texts)

    def _is_held(self, count: int) -> bool:
        return self.max_texts is not None and count >= self.max_texts

    async def _pause(self, request: GenerationRequest, seconds: float) -> None:
        """Waits like a step that is being evaluated: a cancel ends it."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline and request.request_id not in self.cancelled:  # noqa: ASYNC110
            await asyncio.sleep(0.005)

    def _end(self, request: GenerationRequest, script: Script, num_predicted: int) -> Event:
        if script.error is not None:
            return Failed(script.error)
        was_cancelled = request.request_id in self.cancelled
        reason = FinishReason.CANCELLED if was_cancelled else script.reason
        num_prompt, started = len(request.tokens), self._beginning(request, script)
        drafted, accepted = script.drafted_tokens, script.accepted_tokens
        num_evaluated = num_prompt - script.hit_tokens
        timings = Timings(script.hit_tokens, num_evaluated, 20.0, num_predicted, 40.0, drafted, accepted)
        return Finished(
            reason,
            num_prompt,
            timings,
            script.stop_text,
            started,
            script.reasoning_tokens,
            stop_token=script.stop_token,
            is_loop=script.is_loop,
            accepted_prediction_tokens=None if request.prediction is None else accepted,
            rejected_prediction_tokens=None if request.prediction is None else drafted - accepted,
            option_logprobs=tuple(tuple(-float(sum(one)) for one in each.options) for each in request.questions),
        )

    @staticmethod
    def _beginning(request: GenerationRequest, script: Script) -> Started:
        hit = script.hit_tokens
        reuse = Reuse() if script.miss is None else Reuse((script.miss,), 0.5)
        return Started(0, len(request.tokens), hit, hit, 2.0, "memory" if hit else None, reuse)


class FakeRenderer:
    """One token per character; a conversation is its messages joined, each with its role before it."""

    def __init__(self, *, reads_tools: bool = True, opening: str = "") -> None:
        """`opening` is what the text of a prompt ends with; it has no tokens."""
        self.reads_tools = reads_tools
        self.opening = opening
        self.calls: list[dict[str, Any]] = []
        self.replies: list[tuple[str, tuple[int, ...]]] = []
        self.definitions = ToolDefinitions(lambda tools: "".join(f"{json.dumps(tool)}\n" for tool in tools))

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
        *,
        continues: bool = False,
    ) -> RenderedPrompt:
        asked = {"messages": messages, "tools": tools, "template_kwargs": template_kwargs}
        self.calls.append({**asked, "continues": continues})
        if messages[0]["role"] == "assistant":
            raise ChatTemplateError("a conversation cannot start with the assistant")
        text = "".join(f"<{m['role']}>{self._text(m['content'])}" for m in messages)
        end = RestorePoint(len(text), RestorePointKind.PROMPT_END)
        if continues:
            begun = self._text(messages[-1]["content"])
            return RenderedPrompt(self._tokens(text), (end,), text, begun=f"<assistant>{begun}" if begun else "")
        return RenderedPrompt(self._tokens(text), (end,), text + self.opening)

    def encode(self, text: str) -> RenderedPrompt:
        return RenderedPrompt(self._tokens(text))

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        return list(map(int, self._tokens(text)))

    def remember_reply(self, prompt: RenderedPrompt, reply: str, reply_ids: Sequence[int]) -> None:
        self.replies.append((reply, tuple(reply_ids)))

    @staticmethod
    def _text(parts: Any) -> str:
        return "".join(part["text"] for part in parts)

    @staticmethod
    def _tokens(text: str) -> Any:
        return np.array([ord(c) % VOCAB_SIZE for c in text], dtype=np.int32)


class FakeTexts:
    """The texts of `FakeRenderer`'s tokens: a character each; the byte 0xE1 is a token that is none."""

    def piece(self, token_id: int) -> bytes:
        return b"\xe1" if token_id == 0xE1 else chr(token_id).encode()

    def text(self, token_ids: Sequence[int]) -> str:
        return b"".join(map(self.piece, token_ids)).decode(errors="replace")


def fake_model(**changes: Any) -> ServedModel:
    """A model named `tiny` with 200 tokens of context, 1024 words and JSON tool calls."""
    settings: dict[str, Any] = {
        "id": "tiny",
        "renderer": FakeRenderer(),
        "token_texts": FakeTexts(),
        "context_tokens": 200,
        "vocab_size": VOCAB_SIZE,
        "created": 1_700_000_000,
        "call_format": HERMES,
    }
    return ServedModel(**{**settings, **changes})
