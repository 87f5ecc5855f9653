"""The tokens that grammars are about, and masks over them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headrace.text.tokenizer import Tokenizer


class Bytes:
    """A vocabulary as llguidance wants it: the bytes of each token, and which of them steer the model."""

    def __init__(self, tokens: Sequence[bytes], special_ids: Iterable[int], eos_ids: Iterable[int], bos_id: int | None):
        self.tokens = tokens
        self.special_token_ids = sorted(special_ids)
        self.eos_token_ids = sorted(eos_ids)
        self.eos_token_id = self.eos_token_ids[0] if self.eos_token_ids else 0
        self.bos_token_id = bos_id

        self._ids: dict[bytes, int] = {}

    @property
    def mask_bytes(self) -> int:
        """A bit per token, in whole words."""
        return -(-len(self.tokens) // 32) * 4

    def __call__(self, text: str | bytes) -> list[int]:
        """Token ids of a text: the longest token that fits, again and again. Good enough where nothing is generated."""
        if not self._ids:
            self._ids = {piece: token for token, piece in enumerate(self.tokens) if piece}
        data, longest = text.encode() if isinstance(text, str) else text, max(map(len, self._ids))
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(min(longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids), 0)
            if size:
                ids.append(self._ids[data[at : at + size]])
            at += size or 1
        return ids


class Vocabulary(Bytes):
    """With its tokenizer."""

    def __init__(self, tokenizer: Tokenizer, size: int) -> None:
        special, ends = ({token for token in ids if token < size} for ids in (tokenizer.special_ids, tokenizer.eos_ids))
        super().__init__(tokenizer.pieces[:size], special, ends, tokenizer.bos_id)
        self._tokenizer = tokenizer

    def __call__(self, text: str | bytes) -> list[int]:
        return self._tokenizer.encode(text if isinstance(text, str) else text.decode("utf-8", "replace"))

    def plain(self) -> Bytes:
        """Without the tokenizer: for another process."""
        return Bytes(self.tokens, self.special_token_ids, self.eos_token_ids, self.bos_token_id)


def one_of(tokens: Sequence[int], num_bytes: int) -> bytes:
    """The mask that allows these."""
    mask = bytearray(num_bytes)
    for token in tokens:
        mask[token // 8] |= 1 << token % 8
    return bytes(mask)
