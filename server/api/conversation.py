"""A conversation of any dialect, as the model's template reads it, and the prompts that it is rendered to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from models.output.tool_formats import HarmonyFormat
from models.prompt.chat_template import RESERVED_TEMPLATE_ARGUMENTS, Message, RenderedPrompt, plain_text
from server.api.context import PromptRenderer, ServedModel
from server.api.errors import ApiError, Code
from server.api.next_turn import stable_prefix

_THOUGHT = "reasoning_content"


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
