"""A conversation of any dialect, as templates read it.

Templates and clients may drop a finished turn's reasoning or rewrite its calls: `stable_prefix` is what no later
message changes, and `next_turn_requests` evaluates the rest while the engine is idle.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import numpy as np

from cache.snapshots import RestorePointKind
from cache.types import common_prefix_length
from models.output.call_formats import HARMONY
from models.prompt.chat_template import RESERVED_TEMPLATE_ARGUMENTS, ChatRenderer, RenderedPrompt, plain_text
from models.prompt.shapes import Message
from models.texts import read_object
from server.api.bodies import media_of
from server.api.errors import ApiError, Code, wrong
from server.api.images import UNREAD, MediaPlace, image_part, refuse_media, with_pictures
from server.diagnosis.causes import Heal
from server.diagnosis.prompt import Prompt, prompt_of
from server.engine.request import GenerationRequest, Priority
from server.pool.served import ServedModel

MIN_TOKENS_AHEAD = 16
"""Fewer tokens are left to the next turn itself."""

MAX_QUOTABLE_CHARACTERS = 32_768
"""Most characters of new tool results, quoted: tokenizing as many takes some milliseconds."""

_REASONING = "reasoning_content"
_ROLES_ANSWERED = ("user", "tool")
_NEXT_MESSAGE: Message = {"role": "user", "content": [{"type": "text", "text": "a"}]}
_BEFORE_USER = (RestorePointKind.USER_START, RestorePointKind.SYSTEM_END)


def cut_at_last_point(prompt: RenderedPrompt, kinds: tuple[RestorePointKind, ...]) -> RenderedPrompt:
    """A prompt up to its last restore point of these kinds, if any."""
    stop = max((point.offset for point in prompt.restore_points if point.kind in kinds), default=len(prompt.tokens))
    points = tuple(point for point in prompt.restore_points if point.offset <= stop)
    return replace(prompt, tokens=prompt.tokens[:stop], restore_points=points, pictures=prompt.pictures.until(stop))


def next_turn_requests(
    histories: Sequence["Conversation"],
    request: GenerationRequest,
    reply_ids: Sequence[int],
    reply: Sequence[Message],
) -> list[GenerationRequest]:
    """Requests that evaluate, once, where the next prompt differs from `request` and its reply.

    Clients send one of the histories, and a reply with or without its reasoning.
    """
    without = [{name: value for name, value in message.items() if name != _REASONING} for message in reply]
    sent = [reply] if without == list(reply) else [reply, without]
    likely = [history.followed_by(one).stable_prefix() for history in histories for one in sent]
    made = [next_turn_request(request, reply_ids, prefix) for prefix in likely]
    return list({one.tokens.tobytes(): one for one in made if one is not None}.values())


def next_turn_request(
    request: GenerationRequest, reply_ids: Sequence[int], prefix: RenderedPrompt
) -> GenerationRequest | None:
    """The request that evaluates `prefix` after a reply; None below `MIN_TOKENS_AHEAD`."""
    evaluated = np.concatenate([request.tokens, np.array(reply_ids, np.int32)])
    num_common = common_prefix_length(evaluated, prefix.tokens)
    if num_common == len(evaluated) or len(prefix.tokens) - num_common < MIN_TOKENS_AHEAD:
        return None
    return replace(
        request,
        request_id=f"{request.request_id}-next",
        tokens=prefix.tokens,
        pictures=prefix.pictures,
        max_tokens=0,
        prediction=None,
        stop=(),
        priority=Priority.BACKGROUND,
        restore_points=prefix.restore_points,
        outline=prefix.outline,
        quotable=(),
        is_idle_work=True,
    )


@dataclass(frozen=True, eq=False)
class Conversation:
    """All that a prompt is rendered from. Used on a planning thread."""

    renderer: ChatRenderer
    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] = ()
    """At the head of the prompt, in the client's order and wording."""
    template_arguments: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""
    changed_tools: Sequence[Mapping[str, Any]] | None = None
    continues: bool = False
    """The answer continues the last message."""
    forbids_calls: bool = False
    """The answer must not call its prompt's tools."""
    is_compaction: bool | None = None
    """Whether the client says that it sums the conversation up; None in an API in which clients do not say."""
    heals: Sequence[Heal] = ()
    """Changes that the server made to what the client sent."""

    def prepared_for(self, model: ServedModel, healed: "ShownAsBefore | None" = None) -> "Conversation":
        """Adds the name's defaults, and shows it as `healed` does."""
        arguments = {**model.defaults.template_arguments, **self.template_arguments}
        messages = model.defaults.conversation(with_pictures(self.messages, model.vision))
        whole = replace(self, messages=messages, template_arguments=arguments)
        if healed is not None:
            whole = healed(whole, model)
        return replace(whole, forbids_calls=whole.forbids_calls and bool(whole.tools or whole.changed_tools))

    @property
    def declared_tools(self) -> Sequence[Mapping[str, Any]]:
        """The tools at the head of the prompt, and the tools loaded later."""
        return self.tools if self.changed_tools is None else self.changed_tools

    @property
    def callable_tools(self) -> Sequence[Mapping[str, Any]]:
        return () if self.forbids_calls else self.declared_tools

    def render(self) -> RenderedPrompt:
        """The prompt for an answer; raises the renderer's errors."""
        return replace(self._render(self.messages, continues=self.continues), quotable=self._quotable())

    def _quotable(self) -> tuple[str, ...]:
        """New tool results as calls' arguments quote them, where JSON changes them; the newest comes last."""
        texts, left = list[str](), MAX_QUOTABLE_CHARACTERS
        for message in reversed(self.messages):
            if message["role"] not in _ROLES_ANSWERED or not left:
                break
            if message["role"] == "tool":
                text = plain_text(message.get("content"))[:left]
                quoted = json.dumps(text, ensure_ascii=False)[1:-1][:left]
                left -= len(quoted)
                texts += [quoted] if quoted != text else []
        return tuple(reversed(texts))

    @property
    def asked(self) -> Sequence[Message]:
        """All messages but a continued one."""
        return self.messages[:-1] if self.continues else self.messages

    @property
    def begun(self) -> str:
        return plain_text(self.messages[-1].get("content")) if self.continues else ""

    def parts(self, model_id: str) -> Prompt:
        """The parts that requests are compared by."""
        return prompt_of(self.asked, self.tools, self.template_arguments, model=model_id, namespace=self.namespace)

    def whole(self, reply: Message) -> Message:
        """The reply, joined to what it continues."""
        if not self.continues:
            return reply
        first = self.messages[-1]
        text = plain_text(first.get("content")) + plain_text(reply.get("content"))
        reasoning = f"{first.get(_REASONING) or ''}{reply.get(_REASONING) or ''}"
        joined = {**first, **reply, "content": [{"text": text}]}
        return {**joined, _REASONING: reasoning} if reasoning else joined

    def stable_prefix(self) -> RenderedPrompt:
        """The part of the prompt that no later message changes; raises the renderer's errors."""
        if self.messages[-1]["role"] in _ROLES_ANSWERED:
            return cut_at_last_point(self._render(self.messages), (RestorePointKind.PROMPT_END,))
        # Prompts with different user messages begin to differ after the restore point before that message.
        prefix = cut_at_last_point(self._render([*self.messages, _NEXT_MESSAGE]), _BEFORE_USER)
        outline, own = prefix.outline, slice(0, len(self.messages))
        return replace(prefix, outline=replace(outline, starts=outline.starts[own], roles=outline.roles[own]))

    def without_note(self, index: int, text: str) -> "Conversation":
        """The conversation with a message that has this text, or that is left out if it has none.

        Unchanged for a message with pictures.
        """
        if any("picture" in part for part in self.messages[index].get("content") or ()):
            return self
        message = [{**self.messages[index], "content": [{"text": text}]}] if text else []
        return replace(self, messages=[*self.messages[:index], *message, *self.messages[index + 1 :]])

    def followed_by(self, messages: Sequence[Message]) -> "Conversation":
        """The conversation with the assistant's whole message, and any that follow."""
        return replace(self, messages=[*self.asked, *messages], continues=False)

    def _render(self, messages: Sequence[Message], *, continues: bool = False) -> RenderedPrompt:
        shown = (messages, self.tools or None, self.template_arguments, self.namespace)
        return self.renderer.render(*shown, continues=continues)


ShownAsBefore: TypeAlias = Callable[[Conversation, ServedModel], Conversation]
"""Shows a conversation as earlier requests showed it."""


def media_in_words(part: Any) -> str | None:
    """What a prompt shows of a part that is no text: a document's text, else one constant line. None for other parts.

    All dialects ask here.
    """
    kind = media_of(part)
    if kind is None:
        return None
    source = part.get("source")
    given = source if isinstance(source, Mapping) else {}
    content = {"text": given.get("data"), "content": given.get("content")}.get(str(given.get("type")))
    if kind != "document" or content is None:
        return UNREAD.format(kind)
    blocks = content if isinstance(content, list) else [{"text": content}]
    read = (media_in_words(one) or one.get("text") for one in blocks if isinstance(one, Mapping))
    return "\n".join(str(text) for text in (part.get("title"), part.get("context"), *read) if text)


def read_arguments(text: str) -> Any:
    """A call's arguments as an object for templates; a text that is no object stays a text."""
    parsed = read_object(text, allow_nan=True) if text.strip() else {}
    return text if parsed is None else parsed


def first_unanswered(messages: Sequence[Any]) -> int:
    """Where what the person says last begins in unchecked messages or items; their number after a result."""
    start = len(messages)
    while start and _role_of(messages[start - 1]) in ("user", "system", "developer"):
        start -= 1
        content = messages[start].get("content")
        if isinstance(content, list) and any("tool_use_id" in part for part in content if isinstance(part, Mapping)):
            return len(messages)
    return len(messages) if start and _role_of(messages[start - 1]) != "assistant" else start


def _role_of(message: Any) -> Any:
    return message.get("role") if isinstance(message, Mapping) else None


def media_part(part: Any) -> dict[str, Any] | None:
    """A part that is no text as a text part, which may hold an image; None for other parts."""
    if (shown := media_in_words(part)) is None:
        return None
    if media_of(part) == "image":
        return image_part(part)
    return {"type": "text", "text": shown, "cache_control": part.get("cache_control")}


def mark_new_images(messages: Any, param: str = "messages") -> Any:
    """Unchecked messages, where images of the user in what the person says last know their places.

    Raises ApiError (400) for what no model reads there. Everything earlier is shown as `media_in_words`.
    """
    if not isinstance(messages, list):
        return messages
    marked = list(messages)
    for index in range(first_unanswered(messages), len(messages)):
        content = messages[index].get("content")
        if isinstance(content, list) and _role_of(messages[index]) == "user":
            parts = [_new_part(part, MediaPlace(param, index, number)) for number, part in enumerate(content)]
            marked[index] = {**messages[index], "content": parts}
    return marked


def _new_part(part: Any, place: MediaPlace) -> Any:
    kind = media_of(part)
    if kind is None or media_in_words(part) != UNREAD.format(kind):
        return part
    if kind != "image":
        raise refuse_media(place, kind)
    return image_part(part, place)


def check_new_media(items: Any, param: str, model: ServedModel) -> None:
    """Raises ApiError (400) for what the model does not read in what the person says last."""
    if isinstance(items, list):
        with_pictures([one for one in mark_new_images(items, param) if isinstance(one, Mapping)], model.vision)


def can_continue(model: ServedModel) -> bool:
    """Whether answers can be continued; those in channels cannot."""
    return model.call_format is not HARMONY


def check_continuable(model: ServedModel) -> None:
    """Raises ApiError (400)."""
    if not can_continue(model):
        why = f"the answers of the model {model.id!r}, which writes in channels, cannot be continued"
        raise wrong("messages", why, Code.UNSUPPORTED_PARAMETER)


def check_template_arguments(arguments: Mapping[str, Any], param: str) -> None:
    """Raises ApiError (400) if `arguments`, of the field `param`, sets a template value of the server."""
    for name in arguments.keys() & RESERVED_TEMPLATE_ARGUMENTS:
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"{param}.{name} cannot be set by a request", f"{param}.{name}")


NO_EFFORT = "none"


@dataclass(frozen=True)
class ThinkingWish:
    """Whether, how hard and how long the model shall think; None: as the template says."""

    is_enabled: bool | None = None
    effort: str | None = None
    max_tokens: int | None = None

    def template_arguments(self) -> Mapping[str, Any]:
        """The values to pass to chat templates."""
        enables = self.is_enabled
        if enables is None and (self.effort == NO_EFFORT or self.max_tokens == 0):
            enables = False
        arguments = {"enable_thinking": enables, "reasoning_effort": self.effort}
        return {name: value for name, value in arguments.items() if value is not None}
