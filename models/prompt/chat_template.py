"""Text to tokens: a model's own chat template, and where in its output a later prompt may branch off.

The template is a black box: the conversation is rendered again with one thing changed, and a later request can share
what both texts have in common. A character boundary becomes the last token edge before it, best next to an added
token, where the edge holds whatever follows. Any thread.
"""

import copy
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import Any, TypeAlias

import jinja2
import numpy as np
from numpy.typing import NDArray

from cache.snapshots import RestorePoint, RestorePointKind
from models.errors import FOREIGN_FAULTS, ModelError, PromptTooLong
from models.prompt.pictures import NO_PICTURES, Picture, Pictures, PlacedPicture, Placeholder
from models.prompt.shapes import GO_ON, NO_OUTLINE, Message, Outline, Tools, adaptation_for, num_leading_system
from models.prompt.template_sandbox import MAX_SAMPLE_STEPS, MAX_STEPS, bounded_steps
from models.prompt.tokenize import SLICE_CHARACTERS, PromptParts, Tail, encode, stop_if_abandoned
from models.prompt.tool_definitions import Tool, ToolDefinitions
from models.texts import shared_length, well_formed

RESERVED_TEMPLATE_ARGUMENTS = frozenset(
    {
        *("add_generation_prompt", "chat_template", "continue_final_message", "conversation", "messages", "tools"),
        *("max_length", "padding", "sanitize_control_tokens", "tokenize", "tokenizer_kwargs", "truncation"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "additional_special_tokens"),
        *(f"{token}_token" for token in ("bos", "cls", "eos", "mask", "pad", "sep", "unk")),
    }
)

MAX_EDGE_DISTANCE = 16
"""Tokens given up for an edge that holds whatever follows."""

_MAX_ADDED_TOKENS = 70_000
"""Speech models have 65 536 more; above this, no text is cut at added tokens."""
_MAX_ADDED_SQUARES = 1 << 26
"""Limit of the tokens' squared lengths."""
_MAX_FAR_SEARCHES = 64
"""After so many contents not found, the others are searched for nearby only."""
_NEAR_CHARACTERS = 1 << 16
_READS_THINKING = re.compile(r"(?<![\w.'\"])thinking(?![\w'\"])")
_PART_SEPARATOR = "\n"
_ASKS: Message = {"role": "user", "content": "a"}
_CALLS: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "a", "arguments": {}}}],
}
_RESULT: Message = {"role": "tool", "name": "a", "tool_call_id": "call00001", "content": "a"}
_BETWEEN: Message = {"role": "assistant", "content": "Show me the image."}
"""Stands before a result's picture where roles alternate."""
_ANY_PICTURE = [{"type": "image"}]
_MARKS = ("qendx", "q7endx", "qend0fx")
"""Texts that no template changes and that do not overlap themselves."""


class ChatTemplateError(ModelError):
    """The template refuses the conversation; the message is the template's."""


@dataclass(frozen=True, eq=False)
class RenderedPrompt:
    """Token ids, int32 `[num_tokens]`, and offsets worth restoring."""

    tokens: NDArray[np.int32]
    restore_points: tuple[RestorePoint, ...] = ()
    text: str = ""
    outline: Outline = NO_OUTLINE
    tail: Tail | None = None
    begun: str = ""
    """The end of `text`: the assistant's continued message."""
    quotable: tuple[str, ...] = ()
    """Texts that the answer may quote and the prompt does not hold as they are quoted."""
    pictures: Pictures = NO_PICTURES


class ChatRenderer:
    """Renders one model's conversations. Remembers text parts and replies."""

    def __init__(self, tokenizer: Any, max_tokens: int | None = None, placeholder: Placeholder | None = None) -> None:
        """Borrows the tokenizer; a text has at most `max_tokens`; `placeholder` is of a model that sees."""
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._placeholder = placeholder
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        if self._backend is not None:
            # A tokenizer file may ask for truncation and padding; a prompt gets neither.
            self._backend.no_truncation()
            self._backend.no_padding()
        added = getattr(tokenizer, "added_tokens_decoder", {})
        self._added_ids = np.array(sorted(added), dtype=np.int32)
        self._parts = _parts_of(self._backend, added, str(getattr(tokenizer, "chat_template", None) or ""))
        self._adaptation = cache(partial(adaptation_for, partial(_apply_to_sample, tokenizer)))
        self.definitions = ToolDefinitions(self._prompt_with_tools)

    @property
    def reads_tools(self) -> bool:
        template = self._tokenizer.chat_template
        return template is not None and "tools" in str(template)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        namespace: str = "",
        *,
        continues: bool = False,
    ) -> RenderedPrompt:
        """The prompt for the next assistant message, with replies as generated for `namespace`.

        If it `continues`, it ends after the last message's text or reasoning, the assistant's. Raises
        ChatTemplateError, PromptTooLong and Abandoned.
        """
        apply = self._applied(tools, template_kwargs or {})
        shown = "" if self._placeholder is None else self._placeholder.framed
        conversation = _Conversation(apply, messages, shown, has_tools=bool(tools), continues=continues)
        text = conversation.prompt()
        ids, tail, before = self._tokenized(text, namespace)
        pictures = NO_PICTURES
        if conversation.pictures:
            ids, before, pictures = self._placed(ids, before, conversation.pictures)
        is_added = np.isin(ids, self._added_ids)
        # Models with recurrent state restore a picture of another conversation only where a point follows it.
        points = {RestorePoint(one.stop, RestorePointKind.BRANCH) for one in pictures.placed}
        for boundary, kind in conversation.boundaries(text):
            points.add(RestorePoint(_edge(boundary, kind, before, is_added), kind))
            if kind is RestorePointKind.SYSTEM_END:
                # First messages usually differ only after their common header, but a text may merge with the header's
                # last token. So there is a second point before it.
                points.add(RestorePoint(before(boundary), RestorePointKind.BRANCH))
        kept = tuple(sorted(point for point in points if point.offset > 0))
        outline, begun = conversation.outline(text, before), conversation.begun(text)
        return RenderedPrompt(ids, kept, text, outline, tail, begun, pictures=pictures)

    def _placed(
        self, ids: NDArray[np.int32], before: Callable[[int], int], shown: Sequence[Picture]
    ) -> tuple[NDArray[np.int32], Callable[[int], int], Pictures]:
        """Tokens in which pictures have their places in place of placeholders, and how many end by a character.

        Raises ChatTemplateError and PromptTooLong.
        """
        assert self._placeholder is not None, "a model that sees nothing was shown a picture"
        placeholder = self._placeholder.token
        places, counts = np.flatnonzero(ids == placeholder), [picture.num_tokens for picture in shown]
        if len(places) != len(shown):
            raise ChatTemplateError(f"it shows {self._placeholder.text} {len(places)} times for {len(shown)} images")
        if self._max_tokens is not None and (total := len(ids) + sum(counts) - len(counts)) > self._max_tokens:
            raise PromptTooLong(total, self._max_tokens)
        added = np.concatenate([[0], np.cumsum(np.array(counts) - 1)]).astype(np.int64)
        placed = [
            PlacedPicture(int(start), picture) for start, picture in zip(places + added[:-1], shown, strict=True)
        ]
        words = np.split(ids, places)
        parts = [part for one, text in zip(placed, words[1:], strict=True) for part in (one.ids, text[1:])]

        def moved(boundary: int) -> int:
            offset = before(boundary)
            return offset + int(added[np.searchsorted(places, offset)])

        return np.concatenate([words[0], *parts]), moved, Pictures(tuple(placed), placeholder)

    def _applied(self, tools: Tools, arguments: Mapping[str, Any]) -> "_ApplyTemplate":
        """The template with all but the messages; the messages are adapted. Raises ChatTemplateError."""
        tokenizer, adaptation = self._tokenizer, self._adaptation(with_tools=bool(tools))
        if tokenizer.chat_template is None and not getattr(tokenizer, "has_chat_template", False):
            raise ChatTemplateError("this model has no chat template; only plain completions can be asked of it")
        named = _by_its_names(arguments, str(tokenizer.chat_template or ""))
        shown = adaptation.tools([_without_cache_control(tool) for tool in tools or ()])
        placeholder = self._placeholder
        if placeholder is None:
            return lambda messages, generation_prompt: _apply(
                tokenizer, adaptation.messages(messages), shown, generation_prompt=generation_prompt, **named
            )
        broken = partial(_without_texts, texts=placeholder.spelled)
        definitions = [broken(tool) for tool in shown] if shown else shown

        def applied(messages: Sequence[Message], generation_prompt: bool) -> str:
            in_parts = [message if message is GO_ON else _in_parts(broken(message)) for message in messages]
            if not self._shows_results:
                in_parts = _with_results_beside(in_parts, () if self._lets_users_follow else (_BETWEEN,))
            text = _apply(tokenizer, in_parts, definitions, generation_prompt=generation_prompt, **named)
            return text.replace(placeholder.text, placeholder.framed)

        return lambda messages, generation_prompt: applied(adaptation.messages(messages), generation_prompt)

    @cached_property
    def shows_pictures(self) -> bool:
        """Whether the template shows a picture of the user's."""
        return self._shows([{"role": "user", "content": _ANY_PICTURE}])

    @cached_property
    def _shows_results(self) -> bool:
        """Whether the template shows a picture in a tool's result."""
        return self._shows([_ASKS, _CALLS, {**_RESULT, "content": _ANY_PICTURE}])

    @cached_property
    def _lets_users_follow(self) -> bool:
        """Whether the template takes a message of the user's after a tool's result."""
        return bool(_apply_to_sample(self._tokenizer, [_ASKS, _CALLS, _RESULT, _ASKS], None))

    def _shows(self, messages: Sequence[Message]) -> bool:
        text = _apply_to_sample(self._tokenizer, messages, None)
        return self._placeholder is not None and text.count(self._placeholder.text) == 1

    def _prompt_with_tools(self, tools: Sequence[Tool]) -> str:
        with suppress(ChatTemplateError):
            return self._applied(tools, {})([_ASKS], True)
        return ""

    def remember_reply(self, prompt: RenderedPrompt, reply: str, reply_ids: Sequence[int]) -> None:
        """`reply` followed `prompt` as `reply_ids`, without end of turn."""
        if self._parts is not None and prompt.tail is not None:
            self._parts.remember_reply(prompt.tail, reply, reply_ids)

    def encode(self, text: str) -> RenderedPrompt:
        """A plain prompt's tokens, the model's first one included; raises PromptTooLong.

        The restore point is before the last token, which may merge with later text.
        """
        bos, eos = self._tokenizer.bos_token, self._tokenizer.eos_token
        add_special = not (bos and text.startswith(bos))
        ids = self.tokenize(text, add_special=add_special, max_tokens=self._max_tokens)
        if len(ids) > 1 and ids[-1] == self._tokenizer.eos_token_id and not text.endswith(eos):
            ids = ids[:-1]
        points = (RestorePoint(len(ids) - 1, RestorePointKind.PROMPT_END),) if len(ids) > 1 else ()
        return RenderedPrompt(np.array(ids, dtype=np.int32), points, text)

    def tokenize(
        self, text: str, *, add_special: bool = False, parse_special: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Tokens of a text of any length; raises Abandoned, and PromptTooLong above `max_tokens`.

        Without `parse_special`, special tokens' names are text.
        """
        frame = self._frame if add_special else ([], [])
        if frame is None:
            return self._encode_plain(text, add_special_tokens=True, parse_special=parse_special)
        parts = self._parts if parse_special else self._plain_parts
        if parts is None:
            ids = self._encode_plain(text, add_special_tokens=False, parse_special=parse_special)
            return [*frame[0], *ids, *frame[1]]
        try:
            return [*frame[0], *parts.tokenize(text, None, max_tokens).ids.tolist(), *frame[1]]
        except PromptTooLong as error:
            error.param = "prompt"
            raise

    @cached_property
    def _plain_parts(self) -> PromptParts | None:
        if self._backend is None:
            return None
        plain = copy.copy(self._backend)
        plain.encode_special_tokens = True
        added = {number: token for number, token in self._tokenizer.added_tokens_decoder.items() if not token.special}
        return PromptParts(plain, added, at_borders=False)

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]] | None:
        """The ids that the tokenizer puts around a text; None if it does something else."""
        plain, framed = (self._encode_plain("a", add_special_tokens=special) for special in (False, True))
        for start in range(len(framed) - len(plain) + 1):
            if framed[start : start + len(plain)] == plain:
                return framed[:start], framed[start + len(plain) :]
        return None

    def _encode_plain(self, text: str, *, add_special_tokens: bool, parse_special: bool = True) -> list[int]:
        options = {} if parse_special else {"split_special_tokens": True}
        ids = list[int]()
        # Slices of such a text do not overlap: a token at a cut may be another.
        for start in range(0, len(text), SLICE_CHARACTERS):
            some = text[start : start + SLICE_CHARACTERS]
            if self._backend is None:
                stop_if_abandoned()
                ids += self._tokenizer.encode(some, add_special_tokens=add_special_tokens, **options)
            else:
                ids += encode(self._backend, some, add_special_tokens=add_special_tokens).ids
        return ids

    def _tokenized(self, text: str, namespace: str) -> tuple[NDArray[np.int32], Tail | None, Callable[[int], int]]:
        """Ids, a reply's context, and how many tokens end by a character offset."""
        if self._parts is not None:
            tokens = self._parts.tokenize(text, namespace, self._max_tokens)
            return tokens.ids, tokens.tail, lambda boundary: int(np.searchsorted(tokens.ends, boundary, side="right"))
        # A tokenizer without offsets tokenizes the start of the text again.
        encode_plain = partial(self._encode_plain, add_special_tokens=False)
        ids = encode_plain(text)
        return np.array(ids, np.int32), None, lambda boundary: shared_length(encode_plain(text[:boundary]), ids)


_ApplyTemplate: TypeAlias = Callable[[Sequence[Message], bool], str]
"""Gets messages, and whether an answer is to follow."""


class _Conversation:
    def __init__(
        self,
        apply: _ApplyTemplate,
        messages: Sequence[Message],
        placeholder: str = "",
        *,
        has_tools: bool,
        continues: bool,
    ) -> None:
        """`placeholder`: what the template shows for a picture."""
        self._apply, self._placeholder = apply, placeholder
        contents = (message.get("content") for message in messages)
        parts = (part for content in contents if isinstance(content, list | tuple) for part in content)
        self.pictures = [part["picture"] for part in parts if "picture" in part]
        self._messages, self._explicit_ends = _flatten(messages)
        self._has_tools = has_tools
        self._continues = continues

    def prompt(self) -> str:
        if not self._continues:
            return self._apply(self._messages, True)
        # The text after the mark ends the message. A mark that the conversation also holds is useless.
        for mark in _MARKS:
            text = self._apply([*self._messages[:-1], _marked(self._messages[-1], mark)], False)
            if text.count(mark) == 1:
                return text[: text.index(mark)]
        raise ChatTemplateError("the last message is not shown as it is, so it cannot be continued")

    def begun(self, text: str) -> str:
        last = self._messages[-1]
        if not self._continues or not (str(last["content"]).strip() or last.get("reasoning_content")):
            return ""
        try:
            before = self._apply(self._messages[:-1], False)
        except ChatTemplateError:
            return text
        return text[shared_length(text, before) :]

    def boundaries(self, text: str) -> Iterator[tuple[int, RestorePointKind]]:
        for kind, messages in self._variants():
            stop_if_abandoned()
            try:
                variant = self._apply(messages, False)
            except ChatTemplateError:
                # The template accepts this conversation but not its start alone: no point there.
                continue
            yield shared_length(text, variant), kind
        yield from self._answer_start(text)

    def _answer_start(self, text: str) -> Iterator[tuple[int, RestorePointKind]]:
        """Where `text` opens reasoning, which later prompts drop."""
        question, answer = {"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}
        try:
            asked, answered = self._apply([question], True), self._apply([question, answer, question], False)
        except ChatTemplateError:
            return
        opening = asked[shared_length(asked, answered) :]
        if opening and text.endswith(opening):
            yield len(text) - len(opening), RestorePointKind.PROMPT_END

    def outline(self, text: str, tokens_before: Callable[[int], int]) -> Outline:
        starts, position, num_missing = list[int](), 0, 0
        for message in self._messages:
            starts.append(tokens_before(position) if position else 0)
            for content in _shown(str(message["content"]), self._placeholder):
                # If a template shows contents changed, the whole text must not be searched for each of thousands.
                is_near = num_missing >= _MAX_FAR_SEARCHES
                start = text.find(content, position, position + len(content) + _NEAR_CHARACTERS if is_near else None)
                num_missing += start < 0
                position = start + len(content) if start >= 0 else position
        return Outline(tuple(starts), tuple(str(message["role"]) for message in self._messages))

    def _variants(self) -> Iterator[tuple[RestorePointKind, list[Message]]]:
        """Yields conversations that share just the part worth restoring."""
        messages = self._messages
        num_system = num_leading_system(messages)
        if num_system > 1:
            # Agents go on after the first of their system messages alone, as Codex does once it has compacted.
            yield RestorePointKind.SYSTEM_END, _cut(messages, 1)
        if num_system or self._has_tools:
            yield RestorePointKind.SYSTEM_END, _cut(messages, num_system)
        for index in _user_starts(messages):
            yield RestorePointKind.USER_START, _cut(messages, index)
        if self._continues:
            yield RestorePointKind.PROMPT_END, messages[:-1]
        yield RestorePointKind.PROMPT_END, list(messages)
        for index, length in self._explicit_ends:
            yield RestorePointKind.EXPLICIT, _cut_inside(messages, index, length)


def _apply(
    tokenizer: Any,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    *,
    generation_prompt: bool,
    max_steps: int | None = None,
    **arguments: Any,
) -> str:
    try:
        with bounded_steps(max_steps or MAX_STEPS):
            text = tokenizer.apply_chat_template(
                list(messages), tools=tools, add_generation_prompt=generation_prompt, tokenize=False, **arguments
            )
    except (jinja2.TemplateError, *FOREIGN_FAULTS) as error:
        raise ChatTemplateError(str(error) or type(error).__name__) from error
    return well_formed(str(text))


def _by_its_names(arguments: Mapping[str, Any], template: str) -> dict[str, Any]:
    """Some templates rename `enable_thinking`."""
    named = dict(arguments)
    if "enable_thinking" in named and "enable_thinking" not in template and _READS_THINKING.search(template):
        named.setdefault("thinking", named.pop("enable_thinking"))
    return named


def _apply_to_sample(tokenizer: Any, messages: Sequence[Message], tools: Tools) -> str:
    with suppress(ChatTemplateError):
        return _apply(tokenizer, messages, tools, generation_prompt=True, max_steps=MAX_SAMPLE_STEPS)
    return ""


def _edge(boundary: int, kind: RestorePointKind, before: Callable[[int], int], is_added: NDArray[np.bool_]) -> int:
    """The token offset at or before a boundary, never after; the nearest that later text leaves an edge."""
    offset = before(boundary)

    def is_beside_added(edge: int) -> bool:
        return bool(is_added[max(edge - 1, 0) : edge + 1].any())

    is_final = kind is RestorePointKind.PROMPT_END and is_beside_added(offset)
    if kind is RestorePointKind.EXPLICIT or is_final or (offset > 0 and is_added[offset - 1]):
        return offset
    return next(filter(is_beside_added, range(offset - 1, max(offset - MAX_EDGE_DISTANCE, 0), -1)), offset)


def _parts_of(backend: Any, added: Mapping[int, Any], template: str) -> PromptParts | None:
    """None for a slow tokenizer."""
    if backend is None:
        return None
    lengths = [len(token.content) for token in added.values()]
    if len(lengths) <= _MAX_ADDED_TOKENS and sum(n * n for n in lengths) <= _MAX_ADDED_SQUARES:
        # If each of many added tokens begins with another one, the search goes too deep.
        with suppress(RecursionError):
            parts = PromptParts(backend, added, template)
            if parts.fits():
                return parts
    return PromptParts(backend, added, at_borders=False)


_MARK = re.compile("\ufffc([0-9a-f]{32})\ufffc")
"""Stands for a picture, by its digest, in a flat text."""


def _shown(content: str, placeholder: str) -> list[str]:
    """What a template shows of a flat text, piece by piece."""
    first, *others = (text.strip() for text in _MARK.split(content)[::2])
    return [first, *(piece for text in others for piece in (placeholder, text))]


def _in_parts(message: Message) -> Message:
    """A message whose text has marks, as templates read pictures."""
    content = message["content"]
    if not isinstance(content, str) or not _MARK.search(content):
        return message
    first, *others = ({"type": "text", "text": text} for text in _MARK.split(content)[::2])
    parts = [first, *(part for text in others for part in ({"type": "image"}, text))]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _with_results_beside(messages: Sequence[Message], between: Sequence[Message]) -> list[Message]:
    """The pictures of tools' results follow these, and what is `between`, as the user's."""
    shown, images = list[Message](), list[Mapping[str, Any]]()
    for message in messages:
        role, content = message["role"], message["content"]
        if images and between and message is GO_ON:  # a client may say the same
            continue
        if images and role != "tool":
            shown += [*between, {"role": "user", "content": images}]
            if between and role == "user":
                text = [{"type": "text", "text": content}] if isinstance(content, str) else content
                message = {**message, "content": [*shown.pop()["content"], *text]}
            images = []
        if role == "tool" and not isinstance(content, str):
            images += [part for part in content if part["type"] == "image"]
            texts = [part["text"] for part in content if part["type"] == "text"]
            message = {**message, "content": _PART_SEPARATOR.join(texts)}
        shown.append(message)
    return [*shown, *between, {"role": "user", "content": images}] if images else shown


def _without_texts(value: Any, texts: tuple[str, ...]) -> Any:
    """A value in whose texts a space breaks up each of `texts`, which only the template may say."""
    match value:
        case str():
            for text in texts:
                value = value.replace(text, f"{text[:1]} {text[1:]}")
        case Mapping():
            return {name: _without_texts(one, texts) for name, one in value.items()}
        case list() | tuple():
            return [_without_texts(one, texts) for one in value]
    return value


def _flatten(messages: Sequence[Message]) -> tuple[list[Message], list[tuple[int, int]]]:
    flat: list[Message] = []
    explicit_ends: list[tuple[int, int]] = []
    for index, message in enumerate(messages):
        text, part_ends = _flatten_content(message.get("content"), with_marks=True)
        if message.get("cache_control") is not None:
            part_ends.append(len(text))
        explicit_ends += [(index, length) for length in dict.fromkeys(part_ends)]
        flat.append({**_without_cache_control(message), "content": text})
    return flat, explicit_ends


def plain_text(content: Any) -> str:
    """A content's text as templates receive it."""
    return _flatten_content(content)[0]


def _flatten_content(content: Any, *, with_marks: bool = False) -> tuple[str, list[int]]:
    """A content's text, and where parts with `cache_control` end; for a picture its mark or its label."""
    if content is None or isinstance(content, str):
        return content or "", []
    text, ends = "", []
    for number, part in enumerate(content):
        is_beside = "picture" in part or (number and "picture" in content[number - 1])
        text += _PART_SEPARATOR if number and not is_beside else ""
        is_mark = with_marks and "picture" in part
        text += f"\ufffc{part['picture'].digest.hex()}\ufffc" if is_mark else _MARK.sub(r"\1", part["text"])
        if part.get("cache_control") is not None:
            ends.append(len(text))
    return text, ends


def _marked(message: Message, mark: str) -> Message:
    name = "reasoning_content" if message.get("reasoning_content") and not message["content"] else "content"
    return {**message, name: f"{message[name]}{mark}"}


def _without_cache_control(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name != "cache_control"}


def _user_starts(messages: Sequence[Message]) -> list[int]:
    """Indices of the last user message and of the first of its run.

    Clients put notes that change every turn there; the next turn branches off where the run begins.
    """
    last = next((i for i in reversed(range(len(messages))) if messages[i]["role"] == "user"), None)
    if last is None:
        return []
    first = last
    while first > 0 and messages[first - 1]["role"] == "user":
        first -= 1
    return [first] if first == last else [first, last]


def _cut(messages: Sequence[Message], index: int) -> list[Message]:
    follower = str(messages[index]["content"]) if index < len(messages) else ""
    return [*messages[:index], {"role": "user", "content": _unlike(follower)}]


def _cut_inside(messages: Sequence[Message], index: int, length: int) -> list[Message]:
    content = str(messages[index]["content"])
    changed = content[:length] + _unlike(content[length:])
    return [*messages[:index], {**messages[index], "content": changed}]


def _unlike(text: str) -> str:
    return "b" if text.lstrip().startswith("a") else "a"
