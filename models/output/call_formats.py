"""How model families write tool calls: one description each. Reader and grammars follow from it. Pure.

Each text stands exactly as the family's template writes it; the reader takes any white space where a text has some.
In texts `{}` is a name, `#` a call's number, and `*` the kind of a value (`Tags.kinds`).
"""

import re
from collections.abc import Container
from dataclasses import dataclass
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
    """Begins a call's id, which may stand behind its name."""
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
    def markers(self) -> tuple[str, ...]:
        """Texts that hold all special tokens of the format."""
        body = self.body
        inner = (body.key, body.end, *body.quote, *body.whole) if isinstance(body, Tags) else (body.quote,)
        outer = (self.open, self.head, self.end, self.close, self.id_marker, *self.frames)
        texts = (*outer, *inner, *(alias for alias, _ in self.aliases))
        parts = (part for text in texts for part in re.split(r"\{\}|[#*\s]", text))
        return tuple(dict.fromkeys(part for part in parts if len(part) > 1))


def _invokes(name: str, space: str, calls: str, kinds: tuple[tuple[str, str], ...] = ()) -> CallFormat:
    """Tags `invoke` and `parameter` of a name space, between tags `calls`."""
    tokens = (space,) if kinds else ()
    kind = ' string="*"' if kinds else ""
    body = Tags(f'<{space}parameter name="{{}}"{kind}>', f"</{space}parameter>\n", kinds)
    head, end = f'<{space}invoke name="{{}}">\n', f"</{space}invoke>\n"
    signs, outer = f"<{calls}>", (f"<{calls}>\n", f"</{calls}>")
    return CallFormat(name, outer[0], head, body, end, outer[1], repeats_open=False, signs=signs, tokens=tokens)


CODER: Final = CallFormat(
    "qwen3_coder",
    "<tool_call>\n",
    "<function={}>\n",
    Tags("<parameter={}>\n", "\n</parameter>\n"),
    "</function>\n",
    "</tool_call>",
    "\n",
    signs=r"<tool_call>(?:\\n|\n)<function=",
)
GLM: Final = CallFormat(
    "glm",
    "<tool_call>",
    "{}\n",
    Tags("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>\n"),
    "",
    "</tool_call>",
    "\n",
    signs="<arg_key>",
)
LONGCAT: Final = CallFormat(
    "longcat",
    "<longcat_tool_call>",
    "{}\n",
    Tags("<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>", "</longcat_arg_value>\n"),
    "",
    "</longcat_tool_call>",
    "\n",
    signs="<longcat_tool_call>",
)
MINIMAX: Final = _invokes("minimax", "", "minimax:tool_call")
MUSE_SPARK: Final = _invokes("muse_spark", "atem:", "atem:function_calls")
DSML: Final = _invokes("dsml", "｜DSML｜", "｜DSML｜function_calls", (("string", "true"), ("", "false")))
MINICPM: Final = CallFormat(
    "minicpm",
    "",
    '<function name="{}">',
    Tags('<param name="{}">', "</param>", quote=("<![CDATA[", "]]>")),
    "</function>",
    "",
    signs=r'(?s)<function name="(?=.*<param name=")',
)
_OF_TYPES: Final = tuple((kind, kind) for kind in ("string", "number", "boolean", "array", "object", "null"))
KIMI_K3: Final = CallFormat(
    "kimi_k3",
    "<|open|>tools<|sep|>",
    '<|open|>call tool="{}" index="#"<|sep|>',
    Tags(
        '<|open|>argument key="{}" type="*"<|sep|>',
        "<|close|>argument<|sep|>",
        (*_OF_TYPES, ("integer", "number")),
        whole=('<|open|>json type="object"<|sep|>', "<|close|>json<|sep|>"),
    ),
    "<|close|>call<|sep|>",
    "<|close|>tools<|sep|>",
    repeats_open=False,
    tokens=("<|end_of_msg|>",),
)
GEMMA4: Final = CallFormat(
    "gemma4",
    "<|tool_call>",
    "call:{}",
    Literal(quote='<|"|>', has_bare_keys=True),
    "",
    "<tool_call|>",
    signs=r"<\|tool_call>",
)
FUNCTION_GEMMA: Final = CallFormat(
    "function_gemma",
    "<start_function_call>",
    "call:{}",
    Literal(quote="<escape>", has_bare_keys=True),
    "",
    "<end_function_call>",
    signs="<start_function_call>",
)
_PYTHON: Final = Literal("(", ")", "=", "'", has_bare_keys=True)
LFM2: Final = CallFormat(
    "lfm2",
    "<|tool_call_start|>[",
    "{}",
    _PYTHON,
    "",
    "]<|tool_call_end|>",
    ", ",
    repeats_open=False,
    signs=r"<\|tool_(?:list|call)_start\|>",
    tokens=("<|tool_call_start|>",),
)
PYTHONIC: Final = CallFormat(
    "pythonic",
    "<|python_start|>[",
    "{}",
    _PYTHON,
    "",
    "]<|python_end|>",
    ", ",
    repeats_open=False,
    signs=r"\(params_name1=",
    tokens=("<|python_start|>",),
    is_bare=True,
)
HERMES: Final = CallFormat(
    "hermes", "<tool_call>\n", '{"name": "{}", "arguments": ', JSON, "}\n", "</tool_call>", "\n", signs="<tool_call>"
)
LLAMA: Final = CallFormat(
    "llama",
    "<|python_tag|>",
    '{"name": "{}", "parameters": ',
    JSON,
    "}",
    "",
    "; ",
    repeats_open=False,
    signs=r'<\|python_tag\|>|\{"name": function name, "parameters":',
    tokens=("<|python_tag|>",),
    is_bare=True,
)
MISTRAL: Final = CallFormat(
    "mistral",
    "[TOOL_CALLS]",
    "{}[ARGS]",
    JSON,
    "",
    "",
    id_marker="[CALL_ID]",
    signs=r"\[TOOL_CALLS\]",
    tokens=("[TOOL_CALLS]",),
)
KIMI_K2: Final = CallFormat(
    "kimi_k2",
    "<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.{}:#<|tool_call_argument_begin|>",
    JSON,
    "<|tool_call_end|>",
    "<|tool_calls_section_end|>",
    repeats_open=False,
    aliases=(
        ("<|tool_call_section_begin|>", "<|tool_calls_section_begin|>"),
        ("<|tool_call_section_end|>", "<|tool_calls_section_end|>"),
    ),
    signs=r"<\|tool_calls_section_begin\|>",
)
_DEEPSEEK_CALL: Final = "<｜tool▁call▁begin｜>"
DEEPSEEK_V3: Final = CallFormat(
    "deepseek_v3",
    "<｜tool▁calls▁begin｜>",
    f"{_DEEPSEEK_CALL}function<｜tool▁sep｜>{{}}\n```json\n",
    JSON,
    "\n```<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    "\n",
    repeats_open=False,
    signs=f"(?s)(?=.*{_DEEPSEEK_CALL}).*```json",
)
DEEPSEEK_V3_1: Final = CallFormat(
    "deepseek_v3.1",
    "<｜tool▁calls▁begin｜>",
    f"{_DEEPSEEK_CALL}{{}}<｜tool▁sep｜>",
    JSON,
    "<｜tool▁call▁end｜>",
    "<｜tool▁calls▁end｜>",
    repeats_open=False,
    signs=_DEEPSEEK_CALL,
    tokens=(_DEEPSEEK_CALL,),
)
HARMONY: Final = CallFormat(
    "harmony",
    "",
    "<|channel|>commentary to=functions.{} <|constrain|>json<|message|>",
    JSON,
    "<|call|>",
    "",
    frames=("<|start|>", "<|end|>", "<|return|>"),
    signs=r"<\|channel\|>",
    tokens=("<|channel|>",),
)

FORMATS: Final = (
    *(HARMONY, MINIMAX, GEMMA4, FUNCTION_GEMMA, LONGCAT, GLM, LFM2, CODER, KIMI_K2, MINICPM, MISTRAL, MUSE_SPARK),
    *(DSML, DEEPSEEK_V3, DEEPSEEK_V3_1, HERMES, KIMI_K3, PYTHONIC, LLAMA),
)
"""Where several fit a model, the first is taken; a sign counts before tokens."""

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
    found = next(by_sign, None) or next(by_token, None)
    return None if found is not None and found.is_bare and not has_tools else found
