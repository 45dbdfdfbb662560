"""Small tokenizers of the usual shapes, with any added tokens: built here, trained on nothing."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers

_LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ<>|[]=;).1"


@dataclass(frozen=True)
class Flags:
    """What a tokenizer does around an added token."""

    special: bool = False
    rstrip: bool = False
    lstrip: bool = False
    single_word: bool = False
    normalized: bool = False


def tokenizer(shape: str, added: Mapping[str, Flags]) -> Tokenizer:
    """Returns a tokenizer of one of `SHAPES` with the given tokens added."""
    built = SHAPES[shape]()
    built.add_tokens(
        [
            AddedToken(
                content,
                rstrip=flags.rstrip,
                lstrip=flags.lstrip,
                single_word=flags.single_word,
                normalized=flags.normalized,
                special=flags.special,
            )
            for content, flags in added.items()
        ]
    )
    return built


def _bytes() -> Tokenizer:
    """Byte-level BPE, as GPT-2's."""
    merges = [
        ("a", "b"),
        ("ab", "a"),
        ("\u0120", "a"),
        ("\u0120a", "b"),
        ("\u010a", "\u010a"),
        ("s", "s"),
        ("x", "a"),
    ]
    built = Tokenizer(_bpe([*sorted(pre_tokenizers.ByteLevel.alphabet())], merges))
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return built


def _metaspace(prepend: str) -> Callable[[], Tokenizer]:
    def build() -> Tokenizer:
        built = Tokenizer(_spaced_bpe())
        built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
        return built

    return build


def _prepended() -> Tokenizer:
    """Llama 2's: spaces become marks, and every piece gets one, before a merge over the whole piece."""
    built = Tokenizer(_spaced_bpe())
    built.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return built


def _replaced() -> Tokenizer:
    """Gemma's: spaces become marks."""
    built = Tokenizer(_spaced_bpe())
    built.normalizer = normalizers.Replace(" ", "\u2581")
    return built


def _composed() -> Tokenizer:
    """Letters and accents become one character, in lower case."""
    built = _bytes()
    built.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    return built


def _unigram() -> Tokenizer:
    scores = [("<unk>", 0.0), *((letter, -5.0) for letter in (*_LETTERS, "\n", "\u2581"))]
    scores += [("ab", -6.0), ("\u2581a", -7.0), ("\u2581ab", -7.5), ("aba", -8.0), ("\u2581\u2581", -6.0)]
    built = Tokenizer(models.Unigram(scores, unk_id=0))
    built.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    return built


def _spaced_bpe() -> models.BPE:
    merges = [
        ("a", "b"),
        ("ab", "a"),
        ("\u2581", "a"),
        ("\u2581a", "b"),
        ("\u2581", "\u2581"),
        ("s", "s"),
        ("x", "a"),
    ]
    return _bpe([*(f"<0x{byte:02X}>" for byte in range(256)), *_LETTERS, "\u2581"], merges)


def _bpe(letters: list[str], merges: list[tuple[str, str]]) -> models.BPE:
    tokens = list(dict.fromkeys([*letters, *(part + other for part, other in merges)]))
    return models.BPE(vocab={token: number for number, token in enumerate(tokens)}, merges=merges, byte_fallback=True)


SHAPES: Mapping[str, Callable[[], Tokenizer]] = {
    "bytes": _bytes,
    "composed": _composed,
    "metaspace_always": _metaspace("always"),
    "metaspace_first": _metaspace("first"),
    "metaspace_never": _metaspace("never"),
    "prepended": _prepended,
    "replaced": _replaced,
    "unigram": _unigram,
}
