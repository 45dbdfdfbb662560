"""What a request of the Responses API holds: its body, tools and items, and the conversation that they make.

A custom tool is shown as a function of one argument `input`, a namespace as a prefix, a tool search that the client
runs as `tool_search`. What the assistant does between two messages of others is one message.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from itertools import chain, groupby
from typing import Annotated, Any, Final, Literal

from pydantic import BeforeValidator, Field, ValidationInfo
from pydantic_core import PydanticCustomError

from models.prompt.shapes import Message
from models.prompt.tokenize import spend, stop_if_abandoned
from server.api import binding, bodies
from server.api.bodies import Body, BodyModel, Rules, Whole, parse_body, refused, validated
from server.api.conversation import Conversation, ThinkingWish, can_continue, media_part, read_arguments
from server.api.dialect import context_of
from server.api.errors import ApiError, Code, wrong
from server.api.generation import SamplingBody, smallest_limit
from server.api.params import Incoming, Limit
from server.api.responses.output import INPUT, SEARCH, ClientTool, Item, ToolSet, joined_name, reasoning_of
from server.api.responses.store import ResponseStore, store_of
from server.api.sessions import codex_metadata
from server.api.wire import MAX_MESSAGES, json_text
from server.pool.served import ServedModel


def _as_items(value: Any) -> Any:
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if isinstance(value, list):
        return value
    raise PydanticCustomError("input_type", "Input should be a text or a list of items")


def _conversation(value: Any) -> Any:
    return value.get("id") if isinstance(value, dict) else value


class TextFormat(bodies.FormatBody):
    """`text.format`."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[binding.Schema, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BodyModel):
    """`text`."""

    format: TextFormat | None = None
    verbosity: str | None = None


class ReasoningWish(BodyModel):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    """Any value makes reasoning its own summary."""
    generate_summary: str | None = None


Metadata = Annotated[dict[str, Annotated[str, Field(max_length=512)]], Field(max_length=16)]
Items = Annotated[list[Any], BeforeValidator(_as_items)]


class InputBody(binding.CallingBody):
    """The fields that make the prompt."""

    model: str | None = None
    input: Items = Field(default_factory=list)
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: Annotated[str | None, BeforeValidator(_conversation)] = None
    tools: list[Any] | None = None
    tool_choice: Annotated[Any, binding.tool_choice_reader("function", "custom")] = None
    reasoning: ReasoningWish | None = None
    text: TextOptions | None = None
    truncation: Literal["auto", "disabled"] | None = None


_Limit = Annotated[Whole, Field(ge=1)] | None


class ResponsesBody(InputBody, SamplingBody):
    """Body of `POST /v1/responses`."""

    max_output_tokens: _Limit = None
    max_completion_tokens: _Limit = None
    max_tokens: _Limit = None
    """Other names of `max_output_tokens`; the smallest counts."""
    include: list[str] | None = None
    """`reasoning.encrypted_content`: reasoning in the form in which clients send it back."""
    metadata: Metadata | None = None
    max_tool_calls: Whole | None = None
    background: bool | None = None
    """The response outlives its client."""

    def limit(self) -> Limit:
        """The most tokens, if the request says."""
        return smallest_limit(self, "max_output_tokens", "max_completion_tokens", "max_tokens")

    def answer_grammar(self) -> binding.AnswerGrammar | None:
        """The answer's grammar."""
        if self.text is None or (wanted := self.text.format) is None:
            return None
        schema = wanted.schema_ if wanted.type == "json_schema" else None
        return binding.format_grammar("text.format", wanted.type, schema, wanted.strict)


LEFT_OUT: Final = ("web_search", "web_search_preview", "image_generation")
"""Coding agents offer these to every server."""
_QUERY: Final = {"query": {"type": "string"}, "limit": {"type": "integer"}}


class _InputFormat(BodyModel):
    type: Literal["text", "grammar"]
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None


class _CustomTool(binding.NamedTool):
    format: _InputFormat | None = None


class _NamespaceTool(binding.NamedTool):
    tools: list[dict[str, Any]]


class _SearchTool(BodyModel):
    description: str = "Searches the tools that are not loaded yet. What it finds may be called from then on."
    parameters: dict[str, Any] = Field(default={"type": "object", "properties": _QUERY, "required": ["query"]})


def read_tools(tools: Sequence[Any], param: str = "tools", *, defers: bool = True) -> ToolSet:
    """A list's tools; raises ApiError (400).

    `defers`: tools that ask for it are left out until a search finds them.
    """
    shown: list[Mapping[str, Any]] = []
    defers = defers and any(map(_is_client_search, tools))
    by_name: dict[str, ClientTool] = {}
    for place, tool, namespace in _flattened(tools, param):
        function, kind = _read(tool, place, namespace)
        name = function["name"]
        if name in by_name:
            raise wrong(f"{place}.name", f"there are two tools named {name!r}")
        by_name[name] = kind
        if not (defers and tool.get("defer_loading") is True):
            shown.append({"type": "function", "function": function})
    return ToolSet(shown, by_name=by_name)


def _flattened(tools: Sequence[Any], param: str) -> Iterator[tuple[str, Mapping[str, Any], _NamespaceTool | None]]:
    for index, tool in enumerate(tools):
        place = f"{param}[{index}]"
        if _type_of(tool) == "namespace":
            namespace = validated(_NamespaceTool, tool, param, index)
            for number, inner in enumerate(namespace.tools):
                if not _is_left_out(inner):
                    yield f"{place}.tools[{number}]", inner, namespace
        elif not _is_left_out(tool):
            yield place, tool, None


def _is_client_search(tool: Any) -> bool:
    return bool(_type_of(tool) == "tool_search" and tool.get("execution") == "client")


def _is_left_out(tool: Any) -> bool:
    if _type_of(tool) == "tool_search":
        return not _is_client_search(tool)
    # Previews of tools end with a date.
    return any(_type_of(tool) in (name, f"{name}_2025_03_11", f"{name}_2025_08_26") for name in LEFT_OUT)


def _type_of(tool: Any) -> Any:
    return tool.get("type") if isinstance(tool, dict) else None


def _read(tool: Mapping[str, Any], place: str, namespace: _NamespaceTool | None) -> tuple[dict[str, Any], ClientTool]:
    own_name = namespace.name if namespace is not None else None
    match _type_of(tool):
        case "function":
            shown = _dumped(validated(binding.FunctionSpec, tool, place))
            called = ClientTool(shown["name"], own_name)
        case "custom":
            custom = validated(_CustomTool, tool, place)
            parameters = {"type": "object", "properties": {INPUT: _input_schema(custom.format)}, "required": [INPUT]}
            shown = {**_dumped(custom), "parameters": {**parameters, "additionalProperties": False}}
            called = ClientTool(custom.name, own_name, "custom_tool_call")
        case "tool_search":
            given = {name: value for name, value in tool.items() if value is not None}
            shown = _dumped(validated(_SearchTool, given, place))
            return {"name": SEARCH, **shown}, ClientTool(SEARCH, kind="tool_search_call")
        case kind:
            why = f"{str(kind)[:40]!r} is not offered here: functions, custom tools and namespaces of them are"
            raise wrong(f"{place}.type", why, Code.UNSUPPORTED_PARAMETER)
    return {**shown, "name": joined_name(own_name, called.name)}, called


def _dumped(tool: BodyModel) -> dict[str, Any]:
    return tool.model_dump(include=type(tool).model_fields.keys() - {"format"}, exclude_none=True)


def _input_schema(wanted: _InputFormat | None) -> dict[str, Any]:
    """A pattern binds forced calls; a Lark grammar is only shown."""
    if wanted is None or wanted.type == "text" or not wanted.definition:
        return {"type": "string"}
    if wanted.syntax == "regex":
        return {"type": "string", "pattern": f"^(?:{wanted.definition})$"}
    shown = f"A text of this {wanted.syntax or 'lark'} grammar:\n{wanted.definition}"
    return {"type": "string", "description": shown}


IN_INPUT: Rules = refused("""
    prompts are not kept here; send instructions and input: prompt
    its name here is input: messages=[]
    its newer names are tools and tool_choice: functions=[] function_call="none"
""")

IN_RESPONSES: Rules = IN_INPUT | refused("""
    nothing is looked up or judged on the side: moderation
    answers hold text, without data on single tokens: top_logprobs=0
    its name here is text.format: response_format
    its name here is reasoning.effort: reasoning_effort
    a response is one answer: n=1
""")

WITHOUT_EFFECT: Final = (
    *("personality", "client_metadata", "prompt_cache_options", "context_management", "access_programs", "image"),
    "background_options",
)
KNOWN: Final = frozenset((*ResponsesBody.model_fields, *IN_RESPONSES, *WITHOUT_EFFECT))

LOCAL_SHELL: Final = "local_shell"


def _content(value: Any) -> list[dict[str, Any]]:
    """A text, or a list of parts, as parts for templates."""
    if isinstance(value, str):
        return [{"text": value}]
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "Input should be a text or a list of parts")
    return list(map(_part, value))


def _part(part: Any) -> dict[str, Any]:
    if (shown := media_part(part)) is not None:
        return shown
    text = bodies.part_text(part)
    if text is None:
        raise PydanticCustomError("part_type", "A part should be an input_text or output_text with its text")
    return {"text": text}


def _text(value: Any) -> str:
    return "".join(part["text"] for part in _content(value))


def _said(value: Any, info: ValidationInfo) -> tuple[list[dict[str, Any]], str]:
    """What a message says, and the thoughts in it, which only the assistant has."""
    is_reply = info.data.get("role") == "assistant" and isinstance(value, list)
    thoughts = [part for part in value if _type_of(part) == "thinking"] if is_reply else []
    return _content([part for part in value if part not in thoughts] if thoughts else value), _text(thoughts)


_ItemText = Annotated[str, BeforeValidator(_text)]
_ItemContent = Annotated[list[Any], BeforeValidator(_content)]


class _Message(BodyModel):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[tuple[list[Any], str], BeforeValidator(_said)]

    def said(self) -> Mapping[str, Any]:
        content, thoughts = self.content
        return {"role": self.role, "content": content, **({"reasoning_content": thoughts} if thoughts else {})}


class _Call(BodyModel):
    call_id: str

    def called(self) -> tuple[str, Any]:
        raise NotImplementedError

    def said(self) -> Mapping[str, Any]:
        name, arguments = self.called()
        call = {"id": self.call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        return {"role": "assistant", "tool_calls": [call]}


class _FunctionCall(_Call):
    name: str
    arguments: str
    namespace: str | None = None

    def called(self) -> tuple[str, Any]:
        return joined_name(self.namespace, self.name), read_arguments(self.arguments)


class _CustomCall(_Call):
    name: str
    input: str
    namespace: str | None = None

    def called(self) -> tuple[str, Any]:
        return joined_name(self.namespace, self.name), {INPUT: self.input}


class _ShellCall(_Call):
    action: dict[str, Any]

    def called(self) -> tuple[str, Any]:
        return LOCAL_SHELL, self.action


class _SearchCall(_Call):
    arguments: dict[str, Any] = Field(default_factory=dict)

    def called(self) -> tuple[str, Any]:
        return SEARCH, self.arguments


class _SearchOutput(BodyModel):
    call_id: str
    tools: list[dict[str, Any]]


class _Output(BodyModel):
    call_id: str | None = None
    id: str | None = None
    output: Annotated[_ItemContent, BeforeValidator(bodies.tool_result)]

    def said(self) -> Mapping[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id or self.id, "content": self.output}


class _Reasoning(BodyModel):
    summary: _ItemText = ""
    content: _ItemText | None = None
    encrypted_content: str | None = None

    def said(self) -> Mapping[str, Any]:
        reasoning = reasoning_of(self.encrypted_content, self.content, self.summary)
        return {"role": "assistant", "reasoning_content": reasoning}


class _Reference(BodyModel):
    id: str


_KINDS: Final[Mapping[str, type[Any]]] = {
    "message": _Message,
    "function_call": _FunctionCall,
    "function_call_output": _Output,
    "custom_tool_call": _CustomCall,
    "custom_tool_call_output": _Output,
    "local_shell_call": _ShellCall,
    "local_shell_call_output": _Output,
    "tool_search_call": _SearchCall,
    "tool_search_output": _SearchOutput,
    "reasoning": _Reasoning,
    "item_reference": _Reference,
}
ITEM_TYPES: Final = tuple(_KINDS)
SKIPPED_ITEM_TYPES: Final = (
    *("web_search_call", "file_search_call", "code_interpreter_call", "image_generation_call", "mcp_list_tools"),
    "compaction",
)
"""Left out of the prompt: only other servers read these."""


def check_items(items: Sequence[Any], param: str = "input") -> list[Item]:
    """Checked items with types; raises ApiError (400)."""
    return [_checked(item, param, index) for index, item in enumerate(items)]


def _checked(item: Any, param: str, index: int) -> Item:
    place = f"{param}[{index}]"
    if not isinstance(item, dict):
        raise wrong(place, "Input should be an item, an object", Code.INVALID_TYPE)
    kind = item.get("type") or ("message" if "role" in item else "item_reference" if "id" in item else None)
    if isinstance(kind, str) and _is_skipped(item):
        return item
    if not isinstance(kind, str) or kind not in _KINDS:
        raise wrong(f"{place}.type", f"Input should be one of {', '.join(ITEM_TYPES)}")
    validated(_KINDS[kind], item, param, index)
    return {**item, "type": kind}


def _is_skipped(item: Item) -> bool:
    # A tool search run by another server has no call, and the request lists its tools.
    is_search = item.get("type") in ("tool_search_call", "tool_search_output")
    return item.get("type") in SKIPPED_ITEM_TYPES or (is_search and not item.get("call_id"))


def read_messages(items: Sequence[Item], *, sees: bool = False) -> list[Message]:
    """Checked items as messages, with images for a model that `sees`.

    There are no references and results of tool searches any more.
    """
    runs: list[list[Mapping[str, Any]]] = []
    previous = ""
    for item in items:
        stop_if_abandoned()
        if _is_skipped(item):
            continue
        said, kind = _KINDS[item["type"]].model_validate(item).said(), item["type"]
        if runs and runs[-1][-1]["role"] == said["role"] == "assistant" and not kind == previous == "message":
            runs[-1].append(said)
        else:
            runs.append([said])
        previous = kind
    return [_one_message(run, sees=sees) for run in runs]


def _one_message(run: Sequence[Mapping[str, Any]], *, sees: bool) -> Message:
    """A message of what was said in a row; texts are joined once, however many they are."""
    parts: dict[str, list[Any]] = {"content": []}
    for name, value in (field for said in run for field in said.items() if field[1] is not None):
        parts.setdefault(name, []).append(value)
    # Templates know no developer role, the new name of system.
    role = "system" if run[0]["role"] == "developer" else run[0]["role"]
    content = groupby(chain(*parts.pop("content")), lambda part: sees and "image" in part)
    runs = [[*run] if is_image else [{"text": "".join(part["text"] for part in run)}] for is_image, run in content]
    joined = {name: [*chain(*values)] if name == "tool_calls" else "".join(values) for name, values in parts.items()}
    return {**joined, "role": role, "content": [*chain(*runs)] or [{"text": ""}]}


ID_PREFIX = "resp_"
UNFINISHED = ("queued", "in_progress")
_CUT = ("incomplete", "in_progress")
_not_found = partial(wrong, code=Code.RESPONSE_NOT_FOUND)


@dataclass(frozen=True)
class ReadInput:
    """The source of a body's prompt."""

    new: Sequence[Item]
    """With ids; references are resolved."""
    session: str | None
    """The chain's name; None at its beginning."""
    tools: ToolSet
    conversation: Conversation


def parse_known(kind: type[Body], fields: Mapping[str, Any], rules: Rules, known: Set[str] = frozenset()) -> Body:
    """Raises ApiError (400), also for a field that is neither the type's nor `known`."""
    if unknown := sorted(fields.keys() - known - kind.model_fields.keys()):
        name = unknown[0][:200]
        raise ApiError(Code.UNSUPPORTED_PARAMETER, f"{name} is not known here", name)
    return parse_body(kind, fields, rules)


def with_ids(items: Sequence[Item], name: str) -> list[Item]:
    """Items as stored: ids made of `name`, a message's text as a part."""
    return [_as_kept(item, f"in_{name}_{index}") for index, item in enumerate(items)]


def _as_kept(item: Item, item_id: str) -> Item:
    given = item.get("id")
    kept = {**item, "id": given if isinstance(given, str) and given else item_id}
    if item["type"] == "message" and isinstance(item["content"], str):
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part = {"type": kind, "text": item["content"]}
        return {"status": "completed", **kept, "content": [{**part, "annotations": []} if kind[0] == "o" else part]}
    return kept


def read_given(incoming: Incoming, body: InputBody, model: ServedModel, namespace: str, name: str) -> ReadInput:
    """A prompt's source; `name` is the base of new ids. Raises ApiError. Waits for the store."""
    store = context_of(incoming.http).kept(store_of)
    before, session = _history(body, store, namespace)
    if len(before) + len(body.input) > MAX_MESSAGES:
        raise wrong("input", f"at most {MAX_MESSAGES} items make a prompt")
    new = with_ids(list(_resolved(check_items(body.input), before, store, namespace)), name)
    items = [*before, *new]
    given = read_tools(body.tools or ())
    offered = given if binding.shows_tools(model, given.shown, forbids_calls=body.forbids_calls) else ToolSet()
    tools, items = _with_found(offered, items, model, namespace)
    instructions = {"type": "message", "role": "system", "content": body.instructions}
    shown = [instructions, *items] if body.instructions else items
    messages = read_messages(shown, sees=model.vision is not None)
    if not messages:
        raise wrong("input", "Field required", Code.MISSING_PARAMETER)
    last, effort = new[-1] if new else {}, body.reasoning.effort if body.reasoning else None
    conversation = Conversation(
        model.renderer,
        messages=messages,
        tools=tools.shown,
        changed_tools=tools.callable_tools,
        forbids_calls=body.forbids_calls,
        template_arguments=ThinkingWish(effort=effort).template_arguments(),
        namespace=namespace,
        # The last item may be an answer that was cut off.
        is_compaction=codex_metadata(incoming.fields, incoming.http.headers).get("request_kind") == "compaction",
        continues=last.get("role") == "assistant" and last.get("status") in _CUT and can_continue(model),
    ).prepared_for(model, incoming.healed)
    return ReadInput(new, session, tools, conversation)


def _history(body: InputBody, store: ResponseStore, namespace: str) -> tuple[list[Item], str | None]:
    """Earlier items, and their chain's name."""
    name, conversation = body.previous_response_id, body.conversation
    if name is not None and conversation is not None:
        raise wrong("conversation", "it cannot be given with previous_response_id")
    if conversation is not None:
        if (items := store.items(namespace, conversation)) is None:
            raise _not_found("conversation", f"there is no conversation {conversation[:200]!r}")
        return items, conversation
    if name is None:
        return [], None
    links = store.chain(namespace, name)
    if not links:
        raise _not_found("previous_response_id", f"there is no stored response {name[:200]!r}")
    if links[0].parent is not None:
        why = f"the response {links[0].parent!r}, which it goes on from, is not stored any more"
        raise _not_found("previous_response_id", why)
    if links[-1].status in UNFINISHED:
        raise wrong("previous_response_id", f"the response {name!r} has not reached its end")
    return [item for one in links for item in one.items], links[0].session


def _resolved(items: Sequence[Item], before: Sequence[Item], store: ResponseStore, namespace: str) -> Iterator[Item]:
    """The items, with what they refer to instead of references; raises what `spend` raises."""
    known = {one["id"]: one for one in reversed(before)}

    @cache
    def find(wanted: str) -> tuple[Item, int] | None:
        """An item of the history, or of a response whose name the item's id holds, and its size."""
        if wanted in known:
            return known[wanted], len(json_text(known[wanted]))
        parts = wanted.split("_")
        text = store.find_item(namespace, wanted, "response", f"{ID_PREFIX}{parts[1]}") if len(parts) == 3 else None
        return None if text is None else (json.loads(text), len(text))

    for index, item in enumerate(items):
        if item["type"] == "item_reference":
            if (item_found := find(item["id"])) is None:
                raise _not_found(f"input[{index}].id", f"there is no stored item {item['id'][:200]!r}")
            item, num_bytes = item_found
            spend(num_bytes, "input")
        yield item


def _with_found(
    tools: ToolSet, items: Sequence[Item], model: ServedModel, namespace: str
) -> tuple[ToolSet, list[Item]]:
    """The tools, found ones included, and the items, with definitions as the results of searches."""
    read: list[Item] = []
    all_found: list[ToolSet] = []
    digest: bytes | None = None
    for item in items:
        if item["type"] == "tool_search_output" and not _is_skipped(item):
            loaded = read_tools(item["tools"], "input.tools", defers=False)
            shown = {tool["function"]["name"]: tool for tool in loaded.shown}
            place = (namespace, digest := digest or _digest_of_first(items), item["call_id"])
            text = model.renderer.definitions.block(list(shown), shown, place) if shown else "No tool was found."
            item = {"type": "function_call_output", "call_id": item["call_id"], "output": text}
            all_found.append(loaded)
        read.append(item)
    return tools.with_found(all_found), read


def _digest_of_first(items: Sequence[Item]) -> bytes:
    """Tells a conversation by what the user said first."""
    first = json.dumps(next((one.get("content") for one in items if one.get("role") == "user"), None))
    return hashlib.sha256(first.encode()).digest()
