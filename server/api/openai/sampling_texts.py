"""Texts that steer the sampling, as tokens of one model: DRY's sequence breakers and bad words."""

from collections.abc import Sequence

from server.api.context import ServedModel

DEFAULT_BREAKERS = ("\n", ":", '"', "*")
"""Texts that no repetition reaches across: those of llama.cpp and koboldcpp."""


def breaker_tokens(texts: Sequence[str] | None, model: ServedModel) -> tuple[int, ...]:
    """Returns the tokens that hold one of `texts`, or of the usual ones for None, in ascending order.

    For a text that no single token holds it is the last token of that text.
    """
    wanted = DEFAULT_BREAKERS if texts is None else texts
    return tuple(sorted({token for text in wanted if text for token in _tokens_of(text, model)}))


def _tokens_of(text: str, model: ServedModel) -> Sequence[int]:
    last = model.renderer.tokenize(text)[-1:]
    return model.token_search.containing(text) or [token for token in last if token < model.vocab_size]


def bad_word_tokens(texts: Sequence[str], model: ServedModel) -> tuple[tuple[int, ...], ...]:
    """Returns the tokens of each text, at the beginning of a line and behind a blank."""
    forms = {form: None for text in texts for form in (text.lstrip(), " " + text.lstrip()) if text.strip()}
    found = dict.fromkeys(tuple(model.renderer.tokenize(form)) for form in forms)
    return tuple(ids for ids in found if ids and max(ids) < model.vocab_size)
