"""How model families write tool calls: one description each. Reader and grammars follow from it. Pure.

Each text stands exactly as the family's template writes it; the reader takes any white space where a text has some.
In texts `{}` is a name, `#` a call's number, and `*` the kind of a value (`Tags.kinds`).
"""

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Tags:
    """Each argument between tags: a string as it is, other values as JSON."""

    key: str
    """Before a value. A line break that ends it, or begins `end`, belongs to the format, not to the value."""
    end: str
    kinds: tuple[tuple[str, str], ...] = ()
    """What stands for `*` in `key`, by the value's JSON type; the type "" is any other."""
    quote: tuple[str, str] = ("", "")
    """Stand around a string that holds `<`, `&` or a line break."""
    whole: tuple[str, str] = ("", "")
    """Stand around all arguments as one JSON object, which may come in place of tags."""


@dataclass(frozen=True)
class Literal:
    """All arguments as one literal: JSON's, Python's or Gemma's."""

    open: str = "{"
    close: str = "}"
    assign: str = ":"
    """Between a key and its value; in objects that are values it is always `:`."""
    quote: str = '"'
    """Around strings; one of several characters knows no escapes."""
    inner_quote: str = ""
    """What models mean by a quote within a string, if not that quote."""
    has_bare_keys: bool = False


JSON: Final = Literal()


@dataclass(frozen=True)
class CallFormat:
    """What stands around calls, names and arguments."""

    name: str
    open: str
    """Begins calls."""
    head: str
    """Begins one call, up to its arguments."""
    body: Tags | Literal
    end: str
    """Ends one call."""
    close: str
    """Ends calls; empty if a call's end is all."""
    gap: str = ""
    """Between two calls."""
    repeats_open: bool = True
    """Each call has its own `open` and `close`."""
    aliases: tuple[tuple[str, str], ...] = ()
    """Other spellings of `open` and `close`, each with the spelling here."""
    frames: tuple[str, ...] = ()
    """Other special tokens of answers."""
    id_marker: str = ""
    """Begins a call's id, which may stand after its name."""
    signs: str = "(?!)"
    """A pattern of what only the family's templates hold."""
    tokens: tuple[str, ...] = ()
    """Tokens of the family, if its templates hold no sign."""
    is_bare: bool = False
    """An answer may be calls without any marker."""

    @property
    def is_envelope(self) -> bool:
        """The name is a field beside the arguments."""
        return self.head.startswith('{"')

    @property
    def tag(self) -> str:
        """What begins each call, if that is more than its name or a brace."""
        return "" if self.is_envelope else self.head.partition("{}")[0].strip()

    @property
    def openers(self) -> tuple[str, ...]:
        """Texts one of which begins each call, unless calls come bare."""
        spellings = (
            self.open.strip().removesuffix("["),
            *(alias for alias, text in self.aliases if text == self.open),
        )
        tag = self.tag.removesuffix("functions.")
        return tuple(text for text in (*spellings, tag if tag[:1] == "<" else "") if text)

    @property
    def call_end(self) -> str:
        """The marker after each call; empty if what follows tells where it ends."""
        if self.close and (self.repeats_open or not self.end):
            return self.close
        return "" if self.is_envelope else self.end.strip()

    @property
    def markers(self) -> tuple[str, ...]:
        """Texts that hold all special tokens of the format."""
        body = self.body
        inner = (body.key, body.end, *body.quote, *body.whole) if isinstance(body, Tags) else (body.quote,)
        outer = (self.open, self.head, self.end, self.close, self.id_marker, *self.frames)
        texts = (*outer, *inner, *(alias for alias, _ in self.aliases))
        parts = (part for text in texts for part in re.split(r"\{\}|[#*\s]", text))
        return tuple(dict.fromkeys(part for part in parts if len(part) > 1))


def _invokes(
    name: str, space: str, calls: str, others: tuple[str, ...] = (), kinds: tuple[tuple[str, str], ...] = ()
) -> CallFormat:
    """Tags `invoke` and `parameter` of a name space, between tags `calls`, or tags `others`."""
    tokens = (space,) if kinds else ()
    kind = ' string="*"' if kinds else ""
    body = Tags(f'<{space}parameter name="{{}}"{kind}>', f"</{space}parameter>\n", kinds)
    head, end = f'<{space}invoke name="{{}}">\n', f"</{space}invoke>\n"
    around = f"<{calls}>\n", f"</{calls}>"
    aliases = (*((f"<{other}>", around[0]) for other in others), *((f"</{other}>", around[1]) for other in others))
    signs = f"<{calls}>|<{space}tool_calls>" if kinds else f"<{calls}>"
    calls_of = name, around[0], head, body, end, around[1]
    return CallFormat(*calls_of, repeats_open=False, aliases=aliases, signs=signs, tokens=tokens)


def _keyed(name: str, space: str) -> CallFormat:
    """A name, then tags `arg_key` and `arg_value` of a name space."""
    body = Tags(f"<{space}arg_key>{{}}</{space}arg_key>\n<{space}arg_value>", f"</{space}arg_value>\n")
    outer = f"<{space}tool_call>", f"</{space}tool_call>"
    return CallFormat(name, outer[0], "{}\n", body, "", outer[1], "\n", signs=f"<{space}arg_key>")


_XML: Final = Tags("<parameter={}>\n", "\n</parameter>\n")
_IN_XML: Final = "<tool_call>\n", "<function={}>\n", _XML, "</function>\n", "</tool_call>", "\n"
CODER: Final = CallFormat("qwen3_coder", *_IN_XML, signs=r"<tool_call>(?:\\n|\n)<function=")
GLM: Final = _keyed("glm", "")
LONGCAT: Final = _keyed("longcat", "longcat_")
MINIMAX: Final = _invokes("minimax", "", "minimax:tool_call", ("tool_call", "function_calls"))
MUSE_SPARK: Final = _invokes("muse_spark", "atem:", "atem:function_calls")
_KINDS: Final = ("string", "true"), ("", "false")
DSML: Final = _invokes("dsml", "｜DSML｜", "｜DSML｜function_calls", ("｜DSML｜tool_calls",), _KINDS)
_PARAM: Final = Tags('<param name="{}">', "</param>", quote=("<![CDATA[", "]]>"))
_FUNCTION: Final = '<function name="{}">', _PARAM, "</function>"
MINICPM: Final = CallFormat("minicpm", "", *_FUNCTION, "", signs=r'(?s)<function name="(?=.*<param name=")')
_TYPES: Final = {kind: kind for kind in ("string", "number", "boolean", "array", "object", "null")} | {
    "integer": "number"
}
_XTML: Final = Tags(
    '<|open|>argument key="{}" type="*"<|sep|>',
    "<|close|>argument<|sep|>",
    kinds=tuple(_TYPES.items()),
    whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
)
_XTML_CALL: Final = '<|open|>call tool="{}" index="#"<|sep|>', _XTML, "<|close|>call<|sep|>", "<|close|>tools<|sep|>"
KIMI_K3: Final = CallFormat(
    "kimi_k3", "<|open|>tools<|sep|>", *_XTML_CALL, repeats_open=False, tokens=("<|end_of_msg|>",)
)
_GEMMA: Final = Literal(quote='<|"|>', inner_quote='"', has_bare_keys=True)
GEMMA4: Final = CallFormat("gemma4", "<|tool_call>", "call:{}", _GEMMA, "", "<tool_call|>", signs=r"<\|tool_call>")
_ESCAPED: Final = "call:{}", Literal(quote="<escape>", has_bare_keys=True), "", "<end_function_call>"
FUNCTION_GEMMA: Final = CallFormat(
    "function_gemma", "<start_function_call>", *_ESCAPED, signs="<start_function_call>"
)
_PYTHON: Final = "{}", Literal("(", ")", "=", "'", has_bare_keys=True), ""
_LFM: Final = "<|tool_call_start|>[", *_PYTHON, "]<|tool_call_end|>", ", ", False
LFM2: Final = CallFormat("lfm2", *_LFM, signs=r"<\|tool_(?:list|call)_start\|>", tokens=("<|tool_call_start|>",))
_LIST: Final = "<|python_start|>[", *_PYTHON, "]<|python_end|>", ", ", False
PYTHONIC: Final = CallFormat("pythonic", *_LIST, signs=r"\(params_name1=", tokens=("<|python_start|>",), is_bare=True)
_ARGUMENTS: Final = '{"name": "{}", "arguments": ', JSON, "}\n"
HERMES: Final = CallFormat("hermes", "<tool_call>\n", *_ARGUMENTS, "</tool_call>", "\n", signs="<tool_call>")
LLAMA: Final = CallFormat(
    *("llama", "<|python_tag|>", '{"name": "{}", "parameters": ', JSON, "}", "", "; ", False),
    aliases=(("<|python_start|>", "<|python_tag|>"),),
    frames=("<|python_end|>",),
    signs=r'<\|python_tag\|>|\{"name": function name, "parameters":',
    tokens=("<|python_tag|>",),
    is_bare=True,
)
_ARGS: Final = "[TOOL_CALLS]", "{}[ARGS]", JSON, "", ""
MISTRAL: Final = CallFormat(
    "mistral", *_ARGS, id_marker="[CALL_ID]", signs=r"\[TOOL_CALLS\]", tokens=("[TOOL_CALLS]",)
)
_SECTION: Final = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
KIMI_K2: Final = CallFormat(
    *("kimi_k2", _SECTION[0], "<|tool_call_begin|>functions.{}:#<|tool_call_argument_begin|>", JSON),
    *("<|tool_call_end|>", _SECTION[1], "", False),
    aliases=tuple((marker.replace("calls", "call"), marker) for marker in _SECTION),
    signs=r"<\|tool_calls_section_begin\|>",
)
_CALLS, _CALL, _NAME_END = "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"
_CALL_END, _CALLS_END = "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"
DEEPSEEK_V3: Final = CallFormat(
    *(
        "deepseek_v3",
        _CALLS,
        f"{_CALL}function{_NAME_END}{{}}\n```json\n",
        JSON,
        f"\n```{_CALL_END}",
        _CALLS_END,
        "\n",
    ),
    repeats_open=False,
    signs=f"(?s)(?=.*{_CALL}).*```json",
)
DEEPSEEK_V3_1: Final = CallFormat(
    *("deepseek_v3.1", _CALLS, f"{_CALL}{{}}{_NAME_END}", JSON, _CALL_END, _CALLS_END, "", False),
    signs=_CALL,
    tokens=(_CALL,),
)
HARMONY: Final = CallFormat(
    *("harmony", "", "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>", JSON, "<|call|>", ""),
    frames=("<|start|>", "<|end|>", "<|return|>"),
    signs=r"<\|channel\|>",
    tokens=("<|channel|>",),
)

FORMATS: Final = (
    *(HARMONY, MINIMAX, GEMMA4, FUNCTION_GEMMA, LONGCAT, GLM, LFM2, CODER, KIMI_K2, MINICPM, MISTRAL, MUSE_SPARK),
    *(DSML, DEEPSEEK_V3, DEEPSEEK_V3_1, HERMES, KIMI_K3, PYTHONIC, LLAMA),
)
"""Where several fit a model, the first is taken; a sign counts before tokens."""

VARIANTS: Final = (replace(GEMMA4, body=replace(_GEMMA, open="(", close=")", assign="=")),)
"""What models also write in a family's place."""

_DECLARED: Final = {
    "minimax_m2": MINIMAX,
    "glm47": GLM,
    "laguna": GLM,
    "pythonic": LFM2,
    "minicpm5": MINICPM,
    "json_tools": HERMES,
    **{one.name: one for one in FORMATS if one is not PYTHONIC},
}
"""By `tool_parser_type` of a model's `tokenizer_config.json`: names of mlx-lm, and ours."""


def find_call_format(vocabulary: Container[str], template: str, declared: str | None = None) -> CallFormat | None:
    """The format of a model's calls: as its configuration declares, else by template, else by vocabulary."""
    if declared in _DECLARED:
        return _DECLARED[declared]
    by_sign = (one for one in FORMATS if re.search(one.signs, template))
    has_tools = "tools" in template
    by_token = (one for one in FORMATS if any(token in vocabulary for token in one.tokens))
    form = next(by_sign, None) or next(by_token, None)
    return None if form is not None and form.is_bare and not has_tools else form
