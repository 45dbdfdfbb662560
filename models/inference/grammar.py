"""Grammars compiled against one model's tokens; the only module that knows llguidance.

Compiling takes up to about 100 ms, on its own thread. JSON is constrained to one line with at most one space after
commas and colons: a small model would continue white space for ever.
"""

import copy
import json
import logging
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any, Final, TypeVar

import llguidance
import numpy as np
from llguidance.gbnf_to_lark import any_to_lark
from llguidance.numpy import fill_next_token_bitmask
from numpy.typing import NDArray

from models.errors import GrammarFailed, InvalidGrammar, brief
from models.output.grammar import JSON_KINDS, JSON_STYLE, Grammar, GrammarKind, MaskWords

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_KEPT = 16
"""Kept grammars, of at most about 20 MB each, and descriptions of tools."""
MAX_CHECKED: Final = 4096
"""Kept answers on schemas of tools, and spelled texts."""
MAX_CHARACTERS: Final = 1 << 18
MAX_MESSAGE: Final = 400
_SLICES: Final = "[^<]+", r"[^'\"\\<]+"
"""Slices for texts between tags and Python's texts: masks then need not look up each token in them."""
_WORD_BITS = 32
_LIMITS: Final[Any] = llguidance.LLParserLimits(
    initial_lexer_fuel=50_000, step_lexer_fuel=50_000, max_lexer_states=25_000, verbose_errors=False
)
"""Limits of a lexer, which a grammar's outputs share: 7 MB of expressions at first, 10 MB of states."""
_RENEWAL_TOKENS = 256


class GrammarCompiler:
    """Compiles grammars for one model. Any thread."""

    def __init__(self, describe_tokenizer: Callable[[], str], eos_token_ids: Iterable[int]) -> None:
        """`describe_tokenizer` returns a `tokenizer.json`."""
        self._eos = sorted(eos_token_ids)
        self._tokenizer = cache(partial(_read_tokenizer, describe_tokenizer, self._eos))
        self._compiled = lru_cache(MAX_KEPT)(
            lambda grammar: _LlguidanceGrammar(self._tokenizer(), grammar, self._checked(grammar), self._eos)
        )
        self._remembered = lru_cache(MAX_KEPT)(lambda write, *key: write(self, *key))
        self._accepts, self._spelled = lru_cache(MAX_CHECKED)(self._try), lru_cache(MAX_CHECKED)(self._spell)

    def compile(self, grammar: Grammar) -> "_LlguidanceGrammar":
        """Raises InvalidGrammar with the fault."""
        if len(grammar.text) > MAX_CHARACTERS:
            raise InvalidGrammar(f"{len(grammar.text)} characters are more than the {MAX_CHARACTERS} that are taken")
        return self._compiled(grammar)

    def remember(self, write: Callable[..., T], *key: Any) -> T:
        """What `write` makes of this compiler and a key, perhaps earlier; nothing is kept of a long text."""
        is_long = any(isinstance(one, str) and len(one) > MAX_CHARACTERS for one in key)
        made: T = write(self, *key) if is_long else self._remembered(write, *key)
        return made

    def _checked(self, grammar: Grammar) -> str:
        """The library's definition. Refuses a pattern of names that matches none but declared ones.

        The library would allow a comma, and no name after it.
        """
        definition = _definition(grammar)
        if "patternProperties" in grammar.text and grammar.kind in JSON_KINDS:
            for pattern, names in _whole_patterns(json.loads(grammar.text)):
                excluded = "".join(f" & ~/{_in_lark(re.escape(name))}/" for name in names)
                try:
                    self.compile(
                        Grammar(GrammarKind.LARK, f"start: NAME\nNAME: /({_in_lark(pattern[1:-1])})/{excluded}")
                    )
                except InvalidGrammar as error:
                    why = f"patternProperties {pattern!r} matches only properties that are declared; leave it out"
                    raise InvalidGrammar(why) from error
        return definition

    def accepts(self, name: str, grammar: Grammar) -> bool:
        """Whether a grammar can be followed; where not, the log names it once."""
        return self._accepts(name, grammar)

    def _try(self, name: str, grammar: Grammar) -> bool:
        try:
            self.compile(grammar)
        except InvalidGrammar as error:
            logger.warning("%s cannot be bound as described: %s", name, error)
            return False
        return True

    def token_of(self, text: str) -> int | None:
        """The special token with this text."""
        tokens: list[int] = self._tokenizer().tokenize_str(text, parse_special=True)
        return tokens[0] if len(tokens) == 1 and self._tokenizer().is_special_token(tokens[0]) else None

    def spell(self, text: str) -> str:
        """A text in Lark, special tokens by number; empty for none. Raises InvalidGrammar."""
        return self._spelled(text)

    def _spell(self, text: str) -> str:
        tokenizer = self._tokenizer()
        specials = filter(tokenizer.is_special_token, tokenizer.tokenize_str(text, parse_special=True))
        by_text = {tokenizer.decode_str([token]): token for token in specials}
        parts = re.split("|".join(map(re.escape, by_text)).join("()"), text) if by_text else [text]
        spelled = (
            f"<[{by_text[part]}]>" if part in by_text else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )
        return " ".join(spelled)


def _read_tokenizer(describe: Callable[[], str], eos_token_ids: list[int]) -> Any:
    try:
        slices = [*llguidance.LLTokenizer.general_slices(), *_SLICES]
        return llguidance.LLTokenizer(describe(), eos_token=eos_token_ids or None, slices=slices)
    except Exception as error:  # the library raises anything for a tokenizer that it cannot read
        raise InvalidGrammar(f"this model's tokenizer cannot be bound: {_brief(error)}") from error


class _LlguidanceGrammar:
    """One compiled grammar. Any thread."""

    def __init__(self, tokenizer: Any, source: Grammar, definition: str, eos_token_ids: Iterable[int]) -> None:
        self.tokenizer: Final = tokenizer
        self.source: Final = source
        self._definition = definition
        self._lock = threading.Lock()
        self._beginning = self._compile()
        if self._beginning.is_error():
            raise InvalidGrammar(_brief(self._beginning.get_error()))
        self.free: Final = _free_mask(tokenizer.vocab_size, eos_token_ids)
        self._check_beginning()

    def begin(self) -> "_LlguidanceMatcher":
        return _LlguidanceMatcher(self)

    def copy(self, spent: Any = None) -> tuple[Any, Any]:
        """The library's matcher at the beginning, and a copy with the same lexer; renews one that is `spent`."""
        with self._lock:
            if self._beginning is spent:
                self._beginning = self._compile()
            return self._beginning, self._beginning.deep_copy()

    def _compile(self) -> Any:
        return llguidance.LLMatcher(self.tokenizer, self._definition, log_level=0, limits=_LIMITS)

    def _check_beginning(self) -> None:
        matcher, message = _LlguidanceMatcher(self, num_at_renewal=0), "no output of this model is allowed by it"
        try:
            texts = _tokens_in(matcher.mask() & self.free)
            message = "it is too large to be followed; repeat and offer less in it"
            # With too large a lexer the mask still exists; only the first token fails.
            for token in texts[:1].tolist():
                matcher.accept(token)
                matcher.mask()
        except GrammarFailed as error:
            raise InvalidGrammar(f"{message} ({error})") from error


class _LlguidanceMatcher:
    """Follows one output."""

    def __init__(self, grammar: _LlguidanceGrammar, num_at_renewal: int = -_RENEWAL_TOKENS) -> None:
        """`num_at_renewal`: tokens at the last renewal; the first is always allowed."""
        self._grammar = grammar
        self._beginning, self._matcher = grammar.copy()
        self._words = np.zeros((1, len(grammar.free)), np.int32)
        self._tokens: list[int] = []
        self._num_at_renewal = num_at_renewal

    @property
    def is_complete(self) -> bool:
        return bool(self._matcher.is_stopped() and not self._matcher.is_error())

    def accept(self, token: int) -> None:
        self._tokens.append(token)
        self._matcher.consume_token(token)

    def accept_text(self, text: str) -> None:
        for token in self._grammar.tokenizer.tokenize_str(text):
            self.accept(token)

    def mask(self) -> MaskWords:
        fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error() and len(self._tokens) - self._num_at_renewal >= _RENEWAL_TOKENS:
            # Other outputs may have filled the shared lexer.
            self._beginning, self._matcher = self._grammar.copy(self._beginning)
            self._num_at_renewal = len(self._tokens)
            self._matcher.consume_tokens(self._tokens)
            fill_next_token_bitmask(self._matcher, self._words)
        if self._matcher.is_error():
            raise GrammarFailed(f"the answer cannot be bound any further: {_brief(self._matcher.get_error())}")
        words: MaskWords = self._words[0].copy()
        if np.count_nonzero(words) == 1:
            self._spell_out(words)
        return words

    def _spell_out(self, words: MaskWords) -> None:
        """A mask's only token would be rejected if special and standing for text."""
        token = int(_tokens_in(words)[0])
        if self._matcher.validate_tokens([token]) == 1:
            return
        text = self._matcher.compute_ff_bytes().decode("utf-8", "ignore")
        spelled = self._grammar.tokenizer.greedy_tokenize(text)[:1]
        if spelled and self._matcher.validate_tokens(spelled) == 1:
            words[:] = 0
            words[spelled[0] // _WORD_BITS] = np.array(1 << spelled[0] % _WORD_BITS, np.uint32).astype(np.int32)

    def mask_without_end(self) -> MaskWords:
        return self._grammar.free

    def forced(self) -> list[int]:
        tokens: list[int] = self._matcher.compute_ff_tokens()  # its masks forbid any other tokenization
        return tokens

    def copy(self) -> "_LlguidanceMatcher":
        """Another matcher at the same place, with the same lexer."""
        copied = copy.copy(self)
        copied._matcher, copied._tokens = self._matcher.deep_copy(), [*self._tokens]
        return copied


def _definition(grammar: Grammar) -> str:
    matcher = llguidance.LLMatcher
    try:
        match grammar.kind:
            case GrammarKind.JSON_SCHEMA | GrammarKind.LENIENT_JSON_SCHEMA:
                style: Any = {**JSON_STYLE, "lenient": grammar.kind is GrammarKind.LENIENT_JSON_SCHEMA}
                return matcher.grammar_from_json_schema(grammar.text, overrides=style)
            case GrammarKind.REGEX:
                return matcher.grammar_from_regex(grammar.text)
            case GrammarKind.CHOICE:
                texts = [json.dumps(text, ensure_ascii=False) for text in json.loads(grammar.text)]
                return matcher.grammar_from_lark("start: " + " | ".join(texts))
            case GrammarKind.GBNF_OR_LARK | GrammarKind.LARK:
                is_lark = grammar.kind is GrammarKind.LARK
                return matcher.grammar_from_lark(grammar.text if is_lark else any_to_lark(grammar.text))
    except Exception as error:  # the converters raise anything for what they cannot read
        raise InvalidGrammar(_brief(error)) from error


def _in_lark(pattern: str) -> str:
    return pattern.replace("/", r"\/")


def _whole_patterns(schema: Any) -> Iterator[tuple[str, list[str]]]:
    """The patterns of whole names that match declared properties, which stand beside them."""
    for one in schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ():
        yield from _whole_patterns(one)
    if isinstance(schema, dict) and {"properties", "patternProperties"} <= schema.keys():
        names = [*schema["properties"]]
        with suppress(re.error, TypeError):
            for pattern in schema["patternProperties"]:
                if re.fullmatch(r"\^.*\$", pattern) and any(re.search(pattern, name) for name in names):
                    yield pattern, names


def _free_mask(vocab_size: int, eos_token_ids: Iterable[int]) -> MaskWords:
    bits = np.zeros((vocab_size + _WORD_BITS - 1) // _WORD_BITS * _WORD_BITS, np.uint8)
    bits[:vocab_size] = 1
    bits[[token for token in eos_token_ids if token < vocab_size]] = 0
    return np.packbits(bits, bitorder="little").view(np.int32)


def _tokens_in(words: MaskWords) -> NDArray[np.int64]:
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little"))


def _brief(error: object) -> str:
    # After these marks the library lists its own functions.
    return brief(str(error).partition("<backtrace>")[0].partition("<non-verbose/>")[0], MAX_MESSAGE)
