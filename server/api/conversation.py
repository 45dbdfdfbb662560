"""A conversation of any dialect, as the model's template reads it, and the prompts that it is rendered to.

The part of a conversation's prompt that its next prompt will begin with, and evaluating it ahead of time.

Many templates show a finished turn differently from the prompt that asked for it: they drop what the model thought,
or write a tool call in another form. Clients drop thoughts too. `next_turn_requests` makes the requests that evaluate
the differences while the engine is idle, so that the next turn evaluates its new message only.

What a request wants of the model's thoughts, in no dialect's names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from cache.snapshots import RestorePointKind
from cache.types import common_prefix_length
from models.output.tool_formats import HarmonyFormat
from models.prompt.chat_template import RESERVED_TEMPLATE_ARGUMENTS, Message, RenderedPrompt, plain_text
from server.api.errors import ApiError, Code
from server.api.served import PromptRenderer, ServedModel
from server.engine.request import GenerationRequest, Priority

MIN_TOKENS_AHEAD = 16
"""With fewer tokens to evaluate ahead, the next turn evaluates them itself."""

_THOUGHT = "reasoning_content"
_ROLES_ANSWERED = ("user", "tool")
"""Roles after whose message the assistant speaks."""
_NEXT_MESSAGE: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_BEFORE_USER = (RestorePointKind.USER_START, RestorePointKind.SYSTEM_END)

Render: TypeAlias = Callable[[Sequence[Message]], RenderedPrompt]


def stable_prefix(render: Render, messages: Sequence[Message]) -> RenderedPrompt:
    """Returns the part of a conversation's prompt that stays the same whatever follows its last message."""
    if messages[-1]["role"] in _ROLES_ANSWERED:
        return cut_at_last_point(render(messages), (RestorePointKind.PROMPT_END,))
    # The restore point before a user's message is where prompts with different messages of the user begin to differ.
    prefix = cut_at_last_point(render([*messages, _NEXT_MESSAGE]), _BEFORE_USER)
    outline = prefix.outline
    own = slice(0, len(messages))
    return replace(prefix, outline=replace(outline, starts=outline.starts[own], roles=outline.roles[own]))


def cut_at_last_point(prompt: RenderedPrompt, kinds: tuple[RestorePointKind, ...]) -> RenderedPrompt:
    """Returns a prompt up to its last restore point of these kinds; all of it if there is none."""
    stop = max((point.offset for point in prompt.restore_points if point.kind in kinds), default=len(prompt.tokens))
    return replace(
        prompt,
        tokens=prompt.tokens[:stop],
        restore_points=tuple(point for point in prompt.restore_points if point.offset <= stop),
    )


def sent_back(reply: Sequence[Message]) -> list[Sequence[Message]]:
    """Returns a reply as clients send it back: as it was given, and without what was thought."""
    without = [{name: value for name, value in message.items() if name != _THOUGHT} for message in reply]
    return [reply] if without == list(reply) else [reply, without]


def next_turn_requests(
    request: GenerationRequest, reply_ids: Sequence[int], prefixes: Sequence[RenderedPrompt]
) -> list[GenerationRequest]:
    """Returns the requests that evaluate what `prefixes` show otherwise than `request` and its reply, each once."""
    made = [next_turn_request(request, reply_ids, prefix) for prefix in prefixes]
    distinct = {one.tokens.tobytes(): one for one in made if one is not None}
    return list(distinct.values())


def next_turn_request(
    request: GenerationRequest, reply_ids: Sequence[int], prefix: RenderedPrompt
) -> GenerationRequest | None:
    """Returns the request that evaluates `prefix` after `request` was answered with `reply_ids`.

    None where the next turn has nothing to evaluate again, or fewer than `MIN_TOKENS_AHEAD` tokens.
    """
    evaluated = np.concatenate([request.tokens, np.array(reply_ids, np.int32)])
    num_common = common_prefix_length(evaluated, prefix.tokens)
    if num_common == len(evaluated) or len(prefix.tokens) - num_common < MIN_TOKENS_AHEAD:
        return None
    return replace(
        request,
        request_id=f"{request.request_id}-next",
        tokens=prefix.tokens,
        max_tokens=0,
        stop=(),
        priority=Priority.BACKGROUND,
        restore_points=prefix.restore_points,
        outline=prefix.outline,
        is_idle_work=True,
    )


@dataclass(frozen=True, eq=False)
class Conversation:
    """Messages, and all else that the prompt is rendered from. Used on a thread of `server.api.planning`."""

    renderer: PromptRenderer
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]]
    """Those at the head of the prompt, as the client wrote them, so that it keeps their order and wording."""
    template_arguments: Mapping[str, Any]
    namespace: str
    changed_tools: Sequence[Mapping[str, Any]] | None = None
    """The tools behind the last message, with what was loaded and without what was removed; None: as at the head."""
    continues: bool = False
    """Whether the last message is the assistant's, and the answer goes on with it."""
    forbids_calls: bool = False
    """Whether the answer must not call tools that its prompt shows."""

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools that the answer may call."""
        if self.forbids_calls:
            return ()
        return self.tools if self.changed_tools is None else self.changed_tools

    def render(self) -> RenderedPrompt:
        """Returns the prompt that asks for an answer; raises the renderer's errors."""
        shown = (self.messages, self.tools or None, self.template_arguments, self.namespace)
        return self.renderer.render(*shown, continues=True) if self.continues else self.renderer.render(*shown)

    @property
    def asked(self) -> Sequence[Message]:
        """The messages that are answered: all but the one that is continued."""
        return self.messages[:-1] if self.continues else self.messages

    @property
    def begun(self) -> str:
        """The text of the answer that there is already."""
        return plain_text(self.messages[-1].get("content")) if self.continues else ""

    def whole(self, reply: Message) -> Message:
        """Returns the assistant's message that a reply is, or makes together with what it continues."""
        if not self.continues:
            return reply
        first = self.messages[-1]
        text = plain_text(first.get("content")) + plain_text(reply.get("content"))
        thought = f"{first.get(_THOUGHT) or ''}{reply.get(_THOUGHT) or ''}"
        joined = {**first, **reply, "content": [{"text": text}]}
        return {**joined, _THOUGHT: thought} if thought else joined

    def stable_prefix(self) -> RenderedPrompt:
        """Returns the part of the prompt that stays the same whatever follows; raises the renderer's errors."""
        return stable_prefix(self._render, self.messages)

    def followed_by(self, messages: Sequence[Message]) -> "Conversation":
        """Returns the conversation with the assistant's whole message, and what else follows, at its end."""
        return replace(self, messages=[*self.asked, *messages], continues=False)

    def _render(self, messages: Sequence[Message]) -> RenderedPrompt:
        return self.renderer.render(messages, self.tools or None, self.template_arguments, self.namespace)


def open_conversation(
    model: ServedModel,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] = (),
    template_arguments: Mapping[str, Any] | None = None,
    namespace: str = "",
    *,
    changed_tools: Sequence[Mapping[str, Any]] | None = None,
    continues: bool = False,
    forbids_calls: bool = False,
) -> Conversation:
    """Returns the conversation of a request, with what the model's name adds where the request says nothing."""
    defaults = model.defaults
    arguments = {**defaults.template_arguments, **(template_arguments or {})}
    shown, forbids = defaults.conversation(messages), forbids_calls and bool(tools or changed_tools)
    return Conversation(model.renderer, shown, tools, arguments, namespace, changed_tools, continues, forbids)


def can_continue(model: ServedModel) -> bool:
    """Whether answers of `model` can be gone on with: not those that are written in channels."""
    return not isinstance(model.tool_syntax, HarmonyFormat)


def check_continuable(model: ServedModel) -> None:
    """Raises ApiError (400) where a body has an answer gone on with that cannot be."""
    if not can_continue(model):
        message = f"messages: the answers of the model {model.id!r}, which writes in channels, cannot be continued"
        raise ApiError(Code.UNSUPPORTED_PARAMETER, message, "messages")


def check_template_arguments(arguments: Mapping[str, Any], param: str) -> None:
    """Raises ApiError (400) where a request sets what the server itself tells the template. `param` holds them."""
    for name in arguments.keys() & RESERVED_TEMPLATE_ARGUMENTS:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"{param}.{name} cannot be set by a request", f"{param}.{name}")


NO_EFFORT = "none"


@dataclass(frozen=True)
class ThinkingWish:
    """Whether, how hard and for how long the model shall think; None leaves it to the model's template."""

    is_enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None
    """The thought is closed after so many tokens."""

    def template_arguments(self) -> Mapping[str, Any]:
        """Returns the values by which chat templates are told."""
        arguments: dict[str, Any] = {}
        if self._enables is not None:
            arguments["enable_thinking"] = self._enables
        if self.effort is not None:
            arguments["reasoning_effort"] = self.effort
        return arguments

    @property
    def _enables(self) -> bool | None:
        if self.is_enabled is not None:
            return self.is_enabled
        return False if self.effort == NO_EFFORT or self.max_tokens == 0 else None
