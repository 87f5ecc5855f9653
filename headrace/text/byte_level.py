"""Byte-level BPE (GPT-2 and its descendants), built for the `tokenizers` library from the lists of a GGUF file.

Each byte is written as one printable character (Radford et al. 2019, `bytes_to_unicode`), so a token's text maps
back to its exact bytes. What differs between models is the pre-tokenizer: the regular expressions that cut text
into words before merging. GGUF names it in `tokenizer.ggml.pre`; the names and expressions are those of llama.cpp,
whose expressions were checked against each model's own tokenizer.json when they were added there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family of models cuts text into words, before any merge.

    `patterns` are applied in turn, each to the pieces the one before left; matches and what lies between them
    both become pieces. `ignore_merges`: a word that is itself a token needs no merges (Llama 3, Tekken).
    `nfc`: the family normalises to NFC first.
    """

    patterns: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    nfc: bool = False


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|" + _TAIL
_LLAMA3 = _WORDS % r"\p{N}{1,3}"
_QWEN2 = _WORDS % r"\p{N}"
_QWEN35 = _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|" + _TAIL
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%s|%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + _TAIL
)
_TEKKEN = _CASED % ("", "", r"\p{N}")
_GPT4O = _CASED % (_CONTRACTIONS + "?", _CONTRACTIONS + "?", r"\p{N}{1,3}")
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|" + _TAIL,
)

_FAMILIES: tuple[tuple[PreTokenizer, tuple[str, ...]], ...] = (
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")), ("default",)),
    (PreTokenizer((_GPT2,)), ("gpt-2", "phi-2", "mpt", "olmo", "jais")),
    (
        PreTokenizer((r"\p{N}", _GPT2)),
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    ),
    (
        PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True),
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "lfm2"),
    ),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe", "glm4")),
    (PreTokenizer((_QWEN2,), nfc=True), ("qwen2",)),
    (PreTokenizer((_QWEN2,)), ("deepseek-r1-qwen", "stablelm2")),
    (PreTokenizer((_QWEN35,), nfc=True), ("qwen35",)),
    (PreTokenizer((_TEKKEN,), ignore_merges=True, adds_bos=True), ("tekken",)),
    (PreTokenizer((_GPT4O,)), ("gpt-4o",)),
    (PreTokenizer(_DEEPSEEK3), ("deepseek-v3",)),
    (
        PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-\ud7ff]+", r"\p{N}")),
        ("deepseek-coder",),
    ),
    (PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]")), ("falcon",)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: family for family, names in _FAMILIES for name in names}


def _alphabet() -> dict[int, str]:
    """The character that stands for each byte: itself where it is printable Latin-1, else one from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_OF = {ord(char): byte for byte, char in _alphabet().items()}
"""Code point -> byte; usable with `str.translate`."""


def token_bytes(texts: Sequence[str]) -> list[bytes]:
    """The bytes each token text stands for; a character outside the alphabet stands for its own UTF-8.

    One character is one byte, so the common case converts all texts in one call and cuts the result.
    """
    joined = "".join(texts)
    if not BYTE_OF.keys() >= set(map(ord, set(joined))):
        return [b"".join(_char_bytes(char) for char in text) for text in texts]
    data = joined.translate(BYTE_OF).encode("latin-1")
    pieces = []
    start = 0
    for text in texts:
        end = start + len(text)
        pieces.append(data[start:end])
        start = end
    return pieces


def _char_bytes(char: str) -> bytes:
    byte = BYTE_OF.get(ord(char))
    return char.encode() if byte is None else bytes((byte,))


def pre_tokenizer(name: str) -> PreTokenizer:
    """The pre-tokenizer that `tokenizer.ggml.pre` names. Raises ValueError for a name this table does not hold."""
    try:
        return PRE_TOKENIZERS[name]
    except KeyError:
        raise ValueError(
            f"tokenizer.ggml.pre {name!r} is not a known pre-tokenizer; known are {', '.join(sorted(PRE_TOKENIZERS))}."
            " Load the model from a folder with its tokenizer.json instead."
        ) from None


def build(vocabulary: Mapping[str, int], merges: Sequence[str], family: PreTokenizer) -> tokenizers.Tokenizer:
    """A `tokenizers` encoder for ordinary text: no added tokens, so no text can become a control token.

    `merges` are "left right" in order of rank. A byte that the vocabulary lacks (SmolLM2 lacks 21, all of them
    control characters or never in UTF-8) is dropped, as the model's own tokenizer does.
    """
    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    model = models.BPE(vocab=dict(vocabulary), merges=pairs, ignore_merges=family.ignore_merges)
    backend = tokenizers.Tokenizer(model)
    if family.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in family.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return backend
