"""The tokenizer: text to token ids and back, whatever file described it."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from headrace.text import byte_level
from headrace.text.fill_in import FillIn, fill_in_of
from headrace.text.matcher import TokenMatcher
from headrace.text.sentencepiece import SPACE, SentencePiece

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types of `tokenizer.ggml.token_type` (GGUF specification; SentencePiece's own numbering)."""

END_TEXTS = frozenset(
    "</s> <eos> <|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|im_end|> <|end|> <|eot|> "  # noqa: SIM905
    "<end_of_turn> <turn|> <EOT> _<EOT> <|return|> <|call|> <|END_OF_TURN_TOKEN|> <end_of_utterance> "
    "<｜end▁of▁sentence｜>".split()
)
"""Texts that end a turn when they are control tokens: chat models name several, files often only one of them."""

_ALSO_HTML = frozenset({"</s>"})  # in Gemma's vocabulary the closing tag of struck-through text, not an end


class Tokenizer:
    """Text to token ids and back.

    Build one with `from_gguf` or `from_huggingface`. Immutable as seen from outside and safe to share between
    threads. *Control tokens* (`special_ids`) steer the model: begin and end of text, turns, padding. Text becomes
    one only where the caller says `parse_special=True`. User-defined tokens (runs of spaces, `<table>`) are ordinary
    text that happens to be one token, and are always matched.

    Attributes:
        pieces: the exact bytes of each token id; what streaming adds up. Control tokens: the bytes of their text.
        max_token_bytes: the longest of them.
        bos_id, eos_id: None where the vocabulary has none.
        eos_ids: every id that ends a generation; a superset of eos_id.
        special_ids: the control tokens.
        drops_first_space: decoding drops one leading space, since encoding put one there (SentencePiece's rule).
        chat_template: Jinja source, None if the file has none.
        fill_in: the tokens around a text with a gap, None where the model has none.
    """

    def __init__(
        self,
        *,
        encode_ordinary: Callable[[str, bool], list[int]],
        ids: Mapping[str, int],
        pieces: list[bytes],
        control: TokenMatcher,
        bos_id: int | None = None,
        eos_id: int | None = None,
        eos_ids: Iterable[int] = (),
        prefix_ids: Iterable[int] = (),
        suffix_ids: Iterable[int] = (),
        drops_first_space: bool = False,
        chat_template: str | None = None,
        strips: Mapping[int, tuple[bool, bool]] | None = None,
        fill_in: FillIn | None = None,
    ) -> None:
        """For the constructors below. `encode_ordinary(text, at_start)` never returns a control token.

        `prefix_ids` and `suffix_ids`: what `add_special_tokens` puts around a text. `strips[id]`: control tokens
        that swallow the white space on their (left, right), a Hugging Face notion.
        """
        self._encode_ordinary = encode_ordinary
        self._ids = ids
        self._prefix_ids = list(prefix_ids)
        self._suffix_ids = list(suffix_ids)
        self._strips = strips or {}
        self.control = control
        self.pieces = pieces
        self.max_token_bytes = max(map(len, pieces), default=0)
        self.bos_id = bos_id
        self.eos_id = eos_id
        self.special_ids = frozenset(control.ids.values())
        self.drops_first_space = drops_first_space
        self.chat_template = chat_template
        self.fill_in = fill_in
        names = END_TEXTS & control.ids.keys()
        if "<|return|>" in names:  # Harmony: <|end|> only closes a channel, the turn goes on
            names -= {"<|end|>"}
        known = {control.ids[name] for name in names} | set(eos_ids)
        self.eos_ids = frozenset(known if eos_id is None else known | {eos_id})
        for token in self.eos_ids:
            self.token_bytes(token)  # raises for an id outside of the vocabulary

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], *, eos_ids: Iterable[int] = ()) -> "Tokenizer":
        """From the `tokenizer.*` keys of a GGUF file, lists as plain Python lists.

        `eos_ids`: further ends of generation, such as those of a generation_config.json.
        Raises ValueError for a tokenizer model or a pre-tokenizer that is not known, and for a file without vocabulary.
        """
        return _from_gguf(metadata, eos_ids)

    @classmethod
    def from_huggingface(
        cls,
        tokenizer_json: str | Path | Mapping[str, Any],
        tokenizer_config: Mapping[str, Any] | None = None,
        *,
        chat_template: str | None = None,
        eos_ids: Iterable[int] = (),
    ) -> "Tokenizer":
        """From a tokenizer.json (path or parsed) and, if there is one, the parsed tokenizer_config.json.

        `chat_template`: the text of chat_template.jinja where a model keeps it in a file of its own.
        `eos_ids`: `eos_token_id` of generation_config.json, as a list.
        Raises ValueError for a decoder whose tokens have no fixed bytes (WordPiece and the like).
        """
        return _from_huggingface(tokenizer_json, tokenizer_config or {}, chat_template, eos_ids)

    @property
    def vocab_size(self) -> int:
        """Number of token ids. The model's logits may be padded beyond it."""
        return len(self.pieces)

    def id_of(self, text: str) -> int | None:
        """The id of the token whose text in the vocabulary is exactly `text`, None if there is none."""
        return self._ids.get(text)

    def text_of(self, token: int) -> str:
        """The text of one token; for a byte token or half a character, with U+FFFD in it."""
        return self.token_bytes(token).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """The exact bytes a token contributes when streaming. Raises ValueError for an id outside the vocabulary."""
        if not 0 <= token < len(self.pieces):
            raise ValueError(f"token id {token} is outside of the vocabulary of {len(self.pieces)} tokens")
        return self.pieces[token]

    def encode(self, text: str, *, add_special_tokens: bool = False, parse_special: bool = False) -> list[int]:
        """Token ids of `text`.

        `add_special_tokens` adds what the model wants around a prompt (bos, for some eos too). `parse_special` turns
        the texts of control tokens into those tokens: for prompts an operator or a template wrote, not for user text.

        Nearly linear, but not for an event loop: 0.1-2 ms per 1,000 characters. Byte-level and tokenizer.json
        vocabularies release the GIL meanwhile; SentencePiece from GGUF holds it, giving way at the interpreter's
        switch interval. Raises UnicodeEncodeError (a ValueError) for lone surrogates.
        """
        ids = self.encode_segments(self.control.split(text) if parse_special else [text])
        return [*self._prefix_ids, *ids, *self._suffix_ids] if add_special_tokens else ids

    def encode_segments(self, segments: Iterable[str | int]) -> list[int]:
        """Token ids of ordinary stretches of text (str) and control tokens (int), in order. As `encode` otherwise."""
        ids: list[int] = []
        pending = list(segments)
        for i, segment in enumerate(pending):
            if isinstance(segment, int):
                ids.append(segment)
            elif text := self._strip(pending, i, segment) if self._strips else segment:
                ids += self._encode_ordinary(text, i == 0)
        return ids

    def _strip(self, segments: list[str | int], i: int, text: str) -> str:
        left = segments[i - 1] if i else None
        right = segments[i + 1] if i + 1 < len(segments) else None
        if isinstance(left, int) and self._strips.get(left, (False, False))[1]:
            text = text.lstrip()
        if isinstance(right, int) and self._strips.get(right, (False, False))[0]:
            text = text.rstrip()
        return text

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """The text of `ids`: their bytes in a row, read as UTF-8, what is not UTF-8 as U+FFFD.

        Raises ValueError for an id outside the vocabulary.
        """
        skipped = self.special_ids if skip_special_tokens else frozenset()
        data = b"".join(self.token_bytes(token) for token in ids if token not in skipped)
        if self.drops_first_space and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")


def _from_gguf(metadata: Mapping[str, Any], eos_ids: Iterable[int]) -> Tokenizer:
    def get(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    model = get("model")
    if model not in ("gpt2", "llama"):
        raise ValueError(
            f"tokenizer.ggml.model is {model!r}; known are 'gpt2' (byte-level BPE) and 'llama' (SentencePiece BPE). "
            "Load the model from a folder with its tokenizer.json instead."
        )
    texts: list[str] | None = get("tokens")
    if not texts:
        raise ValueError("the GGUF file has no tokenizer.ggml.tokens; it holds no vocabulary")
    types: list[int] = get("token_type") or [NORMAL] * len(texts)
    # Some files mark the end of a turn as ordinary; then every user could write it, and no chat would end.
    unmistakable = END_TEXTS - _ALSO_HTML
    types = [CONTROL if text in unmistakable else kind for text, kind in zip(texts, types, strict=True)]
    control = TokenMatcher({texts[i]: i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN)})
    user_defined = TokenMatcher({texts[i]: i for i, kind in enumerate(types) if kind == USER_DEFINED})
    ids = dict(zip(texts, range(len(texts)), strict=True))

    if model == "gpt2":
        family = byte_level.pre_tokenizer(get("pre", "default"))
        adds_bos = family.adds_bos
        drops_first_space = False
        written = [text if kind == NORMAL else "" for text, kind in zip(texts, types, strict=True)]
        pieces = byte_level.token_bytes(written)
        vocabulary = {text: i for text, i in ids.items() if types[i] not in (CONTROL, UNKNOWN)}
        encode_text = _hugging_face_encoder(byte_level.build(vocabulary, get("merges") or [], family))
        space = ""
    else:
        adds_bos = True
        drops_first_space = bool(get("add_space_prefix", True))
        pieces = [text.replace(SPACE, " ").encode() for text in texts]
        bytes_of = {texts[i]: i for i, kind in enumerate(types) if kind == BYTE}
        for text, i in bytes_of.items():
            pieces[i] = bytes((int(text[1:-1], 16),))  # "<0x0A>"
        encode_text = SentencePiece(
            {text: i for text, i in ids.items() if types[i] == NORMAL},
            get("scores") or [0.0] * len(texts),
            [bytes_of[f"<0x{byte:02X}>"] for byte in range(256)] if bytes_of else None,
            get("unknown_token_id"),
        ).encode
        space = " " if drops_first_space else ""
    for matcher in (control, user_defined):
        for text, i in matcher.ids.items():
            pieces[i] = text.encode()

    def encode_ordinary(text: str, at_start: bool) -> list[int]:
        """Cuts at user-defined tokens. SentencePiece's space goes before each stretch, as llama.cpp has it."""
        if not text.isascii():
            text.encode()  # raises for lone surrogates
        found: list[int] = []
        for segment in user_defined.split(text):
            if isinstance(segment, int):
                found.append(segment)
            else:
                found += encode_text(space + segment)
        return found

    bos_id, eos_id = get("bos_token_id"), get("eos_token_id")
    if model == "llama":
        bos_id, eos_id = get("bos_token_id", 1), get("eos_token_id", 2)
    ends = [get(key) for key in ("eot_token_id", "eom_token_id")]
    return Tokenizer(
        encode_ordinary=encode_ordinary,
        ids=ids,
        pieces=pieces,
        control=control,
        bos_id=bos_id,
        eos_id=eos_id,
        eos_ids=[*eos_ids, *(end for end in ends if end is not None)],
        prefix_ids=[bos_id] if get("add_bos_token", adds_bos) and bos_id is not None else [],
        suffix_ids=[eos_id] if get("add_eos_token", False) and eos_id is not None else [],
        drops_first_space=drops_first_space,
        chat_template=metadata.get("tokenizer.chat_template"),
        fill_in=fill_in_of(ids, metadata),
    )


def _from_huggingface(
    source: str | Path | Mapping[str, Any],
    config: Mapping[str, Any],
    chat_template: str | None,
    eos_ids: Iterable[int],
) -> Tokenizer:
    text = json.dumps(source) if isinstance(source, Mapping) else Path(source).read_text("utf-8")
    backend = _load(text)
    added = backend.get_added_tokens_decoder()
    special = {token: entry for token, entry in added.items() if entry.special}
    odd = [entry.content for entry in special.values() if entry.single_word]
    if odd:
        raise ValueError(f"special tokens matched as whole words only are not supported: {', '.join(map(repr, odd))}")

    # Of the library only ordinary text is asked for, so a stretch after a control token looks to it like the start
    # of a text. That matters where the start alone gets a space in front; such vocabularies are loaded twice.
    rest = backend
    if backend.pre_tokenizer and b'"prepend_scheme":"first"' in backend.pre_tokenizer.__getstate__():
        parsed = json.loads(text)
        steps = json.dumps(parsed["pre_tokenizer"]).replace('"prepend_scheme": "first"', '"prepend_scheme": "never"')
        rest = _load(json.dumps({**parsed, "pre_tokenizer": json.loads(steps)}))
    encode_first, encode_rest = _hugging_face_encoder(backend), _hugging_face_encoder(rest)

    def encode_ordinary(text: str, at_start: bool) -> list[int]:
        return encode_first(text) if at_start else encode_rest(text)

    ids = backend.get_vocab(with_added_tokens=True)
    texts = [""] * (max(ids.values(), default=-1) + 1)  # ids may have gaps; those tokens are empty
    for content, token in ids.items():
        texts[token] = content
    pieces, drops_first_space = _pieces_of(backend, texts)
    for token, entry in special.items():
        pieces[token] = entry.content.encode()

    def named(role: str) -> int | None:
        entry = config.get(role)
        content = entry.get("content") if isinstance(entry, Mapping) else entry
        if content is None:
            return None
        if content not in ids:
            raise ValueError(f"tokenizer_config.json names {content!r} as {role}, which tokenizer.json does not hold")
        return ids[content]

    prefix_ids, suffix_ids = _around(backend)
    template = config.get("chat_template")
    if isinstance(template, list):  # several by name; "default" is the one without a special purpose
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    return Tokenizer(
        encode_ordinary=encode_ordinary,
        ids=ids,
        pieces=pieces,
        control=TokenMatcher({entry.content: token for token, entry in special.items()}),
        bos_id=named("bos_token"),
        eos_id=named("eos_token"),
        eos_ids=eos_ids,
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
        drops_first_space=drops_first_space,
        chat_template=chat_template or template,
        strips={t: (entry.lstrip, entry.rstrip) for t, entry in special.items() if entry.lstrip or entry.rstrip},
        fill_in=fill_in_of(ids),
    )


def _load(text: str) -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer.from_str(text)
    backend.no_padding()
    backend.no_truncation()  # a prompt is refused or taken whole, never cut
    backend.encode_special_tokens = True  # despite its name: control tokens in a text are ordinary text
    return backend


def _hugging_face_encoder(backend: tokenizers.Tokenizer) -> Callable[[str], list[int]]:
    def encode_text(text: str) -> list[int]:
        # Of the library's calls only the batched ones release the GIL; "fast" leaves out offsets.
        return backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode_text


def _pieces_of(backend: tokenizers.Tokenizer, texts: list[str]) -> tuple[list[bytes], bool]:
    """The bytes of each token as the decoder of a tokenizer.json means them, and whether a first space is dropped."""
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": None}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if "ByteLevel" in steps:
        added = {token: entry.content for token, entry in backend.get_added_tokens_decoder().items()}
        pieces = byte_level.token_bytes(["" if i in added else text for i, text in enumerate(texts)])
        for token, content in added.items():
            pieces[token] = content.encode()
        return pieces, False
    spaced = steps.get("Metaspace") or steps.get("Replace")
    if spaced is None:
        raise ValueError(
            f"tokenizer.json has a decoder of type {'+'.join(map(str, steps))}, whose tokens have no fixed text; "
            "known are ByteLevel, Metaspace and Replace with ByteFallback"
        )
    pieces = [text.replace(SPACE, " ").encode() for text in texts]
    if "ByteFallback" in steps:
        for i, text in enumerate(texts):
            if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
                pieces[i] = bytes((int(text[3:5], 16),))
    stripped = "Strip" in steps and steps["Strip"]["start"] > 0
    return pieces, stripped or spaced.get("prepend_scheme", "never") != "never"


def _around(backend: tokenizers.Tokenizer) -> tuple[list[int], list[int]]:
    """The ids that the post-processor of a tokenizer.json puts before and after a text."""
    plain = backend.encode("a", add_special_tokens=False).ids
    whole = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(whole) - len(plain) + 1):
        if plain and whole[start : start + len(plain)] == plain:
            return whole[:start], whole[start + len(plain) :]
    return [], []
