"""Tokenizers against ids from an independent implementation, a second construction, and brute force."""

from __future__ import annotations

import json
import random
import threading
import time
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

from headrace.text import byte_level
from headrace.text.matcher import TokenMatcher
from headrace.text.sentencepiece import SentencePiece
from headrace.text.tokenizer import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Tokenizer

HOSTILE = ["x", " ", "\n", "你", "1", "'", "<u", "<|im_", "a \n", "\u0301", "\u2581", "<"]


# Ids from elsewhere


def test_smollm2_reference_ids(smollm2: Tokenizer, smollm2_reference: dict[str, Any]):
    for case in smollm2_reference["tokenize"]:
        assert smollm2.encode(case["text"], parse_special=True) == case["ids"], case["text"]
    for case in smollm2_reference["prompts"]:
        assert smollm2.encode(case["text"], add_special_tokens=True) == case["ids"]
        assert smollm2.decode(case["ids"]) == case["text"]
    for case in smollm2_reference["chat"]:
        assert smollm2.encode(case["text"], parse_special=True) == case["ids"]
        assert smollm2.decode(case["greedy"]) == case["greedy_text"]


def test_gemma_reference_ids(gemma: Tokenizer, gemma_reference: dict[str, Any]):
    for case in gemma_reference["tokenize"]:
        assert gemma.encode(case["text"], parse_special=True) == case["ids"], case["text"]
        assert gemma.encode(case["text"]) == case["ids"], case["text"]
        assert gemma.decode(case["ids"]) == case["text"]
    for case in gemma_reference["prompts"]:
        assert gemma.encode(case["text"], add_special_tokens=True) == case["ids"]
        assert gemma.decode(case["ids"], skip_special_tokens=True) == case["text"]


@pytest.fixture(scope="module")
def smollm2_library(smollm2_config: dict[str, Any]) -> Library:
    """SmolLM2 as its tokenizer.json has it: single digits, then the library's own GPT-2 pre-tokenizer."""
    texts = smollm2_config["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in smollm2_config["tokenizer.ggml.merges"]]
    library = Library(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(texts[:17])
    return library


@settings(max_examples=200, deadline=None)
@given(text=st.text() | st.text("aĠ 1²½٣'sS\r\n\t\u3000é你<|im_end|>.,-"))
def test_smollm2_agrees_with_the_library(smollm2: Tokenizer, smollm2_library: Library, text: str):
    assert smollm2.encode(text, parse_special=True) == smollm2_library.encode(text, add_special_tokens=False).ids
    ids = smollm2.encode(text)
    assert smollm2.special_ids.isdisjoint(ids)


def test_smollm2_from_tokenizer_json_is_the_same(smollm2: Tokenizer, smollm2_library: Library):
    other = Tokenizer.from_huggingface(json.loads(smollm2_library.to_str()), {"eos_token": "<|im_end|>"})
    assert other.pieces == smollm2.pieces
    assert (other.special_ids, other.eos_ids) == (smollm2.special_ids, smollm2.eos_ids)
    for text in ("<|im_start|>user\nHi 123<|im_end|>", " é你 \n\n x", ""):
        for parse_special in (True, False):
            assert other.encode(text, parse_special=parse_special) == smollm2.encode(text, parse_special=parse_special)


def brute_force_merges(text: str, scores: dict[str, float]) -> list[str]:
    symbols = list(text)
    while True:
        pairs = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(symbols)) if a + b in scores]
        if not pairs:
            return symbols
        i = min(pairs)[1]
        symbols[i : i + 2] = [symbols[i] + symbols[i + 1]]


@settings(max_examples=300, deadline=None)
@given(
    pieces=st.dictionaries(st.text("ab \u2581>", min_size=1, max_size=4), st.integers(-3, 3), max_size=25),
    text=st.text("ab >", max_size=40),
)
def test_sentencepiece_is_greedy_merging(pieces: dict[str, int], text: str):
    """Borders between words and stale queue entries change nothing; equal scores go leftmost first."""
    pieces = {piece.replace(" ", "\u2581"): score for piece, score in pieces.items()}
    pieces |= dict.fromkeys("ab▁>", -9)
    ids = {piece: i for i, piece in enumerate(pieces)}
    model = SentencePiece(ids, list(map(float, pieces.values())), None, 99)
    expected = [ids[symbol] for symbol in brute_force_merges(text.replace(" ", "\u2581"), pieces)]
    assert model.encode(text) == expected
    assert model.encode(text) == expected, "the second time from the cache"


# Control tokens and ordinary text


def test_ordinary_text_yields_no_control_token(smollm2: Tokenizer, gemma: Tokenizer):
    for tokenizer in (smollm2, gemma):
        everything = "".join(tokenizer.control.ids)
        ids = tokenizer.encode(everything)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == everything
        assert tokenizer.encode(everything, parse_special=True) == list(tokenizer.control.ids.values())


def test_user_defined_tokens_are_ordinary(gemma: Tokenizer):
    assert gemma.encode("<table>\n\n\n") == [168, 109]
    assert gemma.encode("</s>") == [212], "struck-through text in Gemma's vocabulary, the end in others"
    assert gemma.encode(" " * 40) == [gemma.id_of(" " * 31), gemma.id_of(" " * 9)]


def test_attributes(smollm2: Tokenizer, gemma: Tokenizer):
    assert (smollm2.vocab_size, smollm2.bos_id, smollm2.eos_id) == (49152, 1, 2)
    assert smollm2.eos_ids == {0, 2}, "<|endoftext|> and <|im_end|>"
    assert smollm2.special_ids == set(range(17))
    assert smollm2.chat_template is not None
    assert "<|im_start|>" in smollm2.chat_template
    assert (gemma.vocab_size, gemma.bos_id, gemma.eos_id) == (262144, 2, 1)
    assert gemma.eos_ids == {1, 106}, "<eos> and <end_of_turn>"
    assert gemma.chat_template is None
    assert smollm2.id_of("<|im_end|>") == 2
    assert smollm2.id_of("no such token") is None
    assert smollm2.token_bytes(2) == b"<|im_end|>"
    assert gemma.token_bytes(238 + 0x0A) == b"\n"
    with pytest.raises(ValueError, match="token id 49152 is outside of the vocabulary of 49152"):
        smollm2.decode([49152])
    with pytest.raises(ValueError, match="token id -1"):
        smollm2.token_bytes(-1)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_round_trip(gemma: Tokenizer, text: str):
    """Any text comes back; only U+2581 does not, which SentencePiece writes for a space."""
    assert gemma.decode(gemma.encode(text)) == text.replace("\u2581", " ")


@settings(max_examples=200)
@given(tokens=st.sets(st.text("ab<", max_size=4), max_size=8), text=st.text("ab<", max_size=30))
def test_matcher_is_leftmost_longest(tokens: set[str], text: str):
    ids = {token: i for i, token in enumerate(sorted(tokens - {""}))}
    found, ordinary, i = [], "", 0
    while i < len(text):
        longest = max((t for t in ids if text.startswith(t, i)), key=len, default="")
        if longest:
            found += [ordinary] * bool(ordinary) + [ids[longest]]
            ordinary = ""
        else:
            ordinary += text[i]
        i += len(longest) or 1
    matcher = TokenMatcher(ids)
    assert matcher.split(text) == found + [ordinary] * bool(ordinary)
    assert list(matcher.starts(text)) == [i for i in range(len(text)) if any(text.startswith(t, i) for t in ids)]


# Cost


def test_hostile_text_costs_linear_time(smollm2: Tokenizer, gemma: Tokenizer):
    for tokenizer in (smollm2, gemma):
        for unit in HOSTILE:
            text = unit * (100_000 // len(unit))
            start = time.process_time()
            ids = tokenizer.encode(text, parse_special=True)
            assert time.process_time() - start < 3.0, (unit, "quadratic would be minutes")
            assert tokenizer.decode(ids) == text.replace("\u2581", " ") or tokenizer is smollm2


def test_loading_and_encoding_are_quick(
    smollm2_config: dict[str, Any], gemma_config: dict[str, Any], smollm2_reference: dict[str, Any]
):
    """Bounds that only a cost of another kind breaks, quadratic say; the usual figures are in the docstrings."""
    text = " ".join(case["text"] for case in smollm2_reference["prompts"]) * 20
    for config, limit_s in ((smollm2_config, 3.0), (gemma_config, 10.0)):
        start = time.process_time()
        tokenizer = Tokenizer.from_gguf(config)
        assert time.process_time() - start < limit_s
        start = time.process_time()
        tokenizer.encode(text[:10_000])
        assert time.process_time() - start < 1.0


def test_threads_share_a_tokenizer(smollm2: Tokenizer, gemma: Tokenizer):
    texts = [f"thread {i} says {'ab ' * i}" for i in range(30)]
    for tokenizer in (smollm2, gemma):
        expected = [tokenizer.encode(text) for text in texts]
        results: list[list[list[int]]] = []
        threads = [
            threading.Thread(target=lambda t=tokenizer: results.append([t.encode(x) for x in texts])) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert results == [expected] * 4


# Small vocabularies


def small_gguf(**changes: Any) -> dict[str, Any]:
    """A Llama-2-like vocabulary: a space in front, byte pieces, a control token that its maker forgot to mark."""
    texts = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "\u2581", "a", "\u2581a", "b", "<|im_end|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 4, USER_DEFINED]
    scores = [0.0] * 259 + [-3.0, -4.0, -1.0, -5.0, 0.0]
    keys = {"model": "llama", "tokens": texts, "token_type": types, "scores": scores, "eos_token_id": 2} | changes
    return {f"tokenizer.ggml.{key}": value for key, value in keys.items() if value is not None}


def test_space_prefix():
    """SentencePiece puts one space before a text, and decoding drops one."""
    tokenizer = Tokenizer.from_gguf(small_gguf())
    assert tokenizer.drops_first_space
    assert tokenizer.encode("a", add_special_tokens=True) == [1, 261]
    assert tokenizer.encode("a</s>a", parse_special=True) == [261, 2, 261], "as llama.cpp: again after a control token"
    assert tokenizer.decode([261, 261]) == "a a"
    assert tokenizer.decode([1, 261], skip_special_tokens=True) == "a"
    assert tokenizer.decode([1, 261]) == "<s> a"
    plain = Tokenizer.from_gguf(small_gguf(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert plain.encode("a", add_special_tokens=True) == [260, 2]
    assert plain.decode([261]) == " a"


def test_a_forgotten_end_of_turn_is_control():
    """A GGUF that marks <|im_end|> as user-defined would let every user end the turn, and no chat would end."""
    tokenizer = Tokenizer.from_gguf(small_gguf())
    assert tokenizer.eos_ids == {2, 263}
    assert 263 not in tokenizer.encode("<|im_end|>")
    assert Tokenizer.from_gguf(small_gguf(eot_token_id=1), eos_ids=[0]).eos_ids == {0, 1, 2, 263}
    with pytest.raises(ValueError, match="token id 999"):
        Tokenizer.from_gguf(small_gguf(), eos_ids=[999])


def test_vocabulary_without_bytes():
    config = small_gguf(tokens=["<unk>", "\u2581", "a"], token_type=[2, 1, 1], scores=[0.0] * 3, unknown_token_id=0)
    assert Tokenizer.from_gguf(config | {"tokenizer.ggml.eos_token_id": 0}).encode("a??a") == [1, 2, 0, 2]
    del config["tokenizer.ggml.unknown_token_id"]
    with pytest.raises(ValueError, match="neither byte pieces"):
        Tokenizer.from_gguf(config)


def test_unknown_kinds_are_refused():
    with pytest.raises(ValueError, match=r"tokenizer.ggml.model is 'rwkv'.*'gpt2'.*'llama'"):
        Tokenizer.from_gguf(small_gguf(model="rwkv"))
    with pytest.raises(ValueError, match=r"tokenizer.ggml.pre 'novel' .* smollm"):
        Tokenizer.from_gguf(small_gguf(model="gpt2", pre="novel"))
    with pytest.raises(ValueError, match="no vocabulary"):
        Tokenizer.from_gguf(small_gguf(tokens=None))
    with pytest.raises(ValueError, match="surrogates"):
        Tokenizer.from_gguf(small_gguf()).encode("\ud800")


def test_harmony_end_of_channel_is_no_end():
    texts = ["a", "<|end|>", "<|return|>", "<|call|>"]
    config = {"model": "gpt2", "pre": "gpt-4o", "tokens": texts, "token_type": [1, 3, 3, 3], "merges": []}
    tokenizer = Tokenizer.from_gguf({f"tokenizer.ggml.{key}": value for key, value in config.items()})
    assert tokenizer.eos_ids == {2, 3}


@pytest.mark.parametrize("name", sorted(byte_level.PRE_TOKENIZERS))
def test_pre_tokenizers_lose_nothing(name: str):
    """Every expression compiles, and what it leaves between matches is kept."""
    alphabet = sorted(byte_level.BYTE_OF.items())
    vocabulary = {chr(char): byte for char, byte in alphabet}
    backend = byte_level.build(vocabulary, [], byte_level.pre_tokenizer(name))
    text = "Hello  WorldIs don't I'LL 12345 x=1;\r\n\n 你好 ½ \u3000🙂 tail "
    assert bytes(backend.encode(text).ids).decode() == text


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt-2", ["I", "'", "LL", " pay", " 12345", " dollars", "!!"]),
        ("smollm", ["I", "'", "LL", " pay", " ", "1", "2", "3", "4", "5", " dollars", "!!"]),
        ("llama-bpe", ["I", "'LL", " pay", " ", "123", "45", " dollars", "!!"]),
        ("qwen2", ["I", "'LL", " pay", " ", "1", "2", "3", "4", "5", " dollars", "!!"]),
        ("gpt-4o", ["I'LL", " pay", " ", "123", "45", " dollars", "!!"]),
        ("default", ["I", "'", "LL", " pay", " ", "123", "45", " dollars", "!!"]),
    ],
)
def test_pre_tokenizer_words(name: str, words: list[str]):
    steps = byte_level.build({}, [], byte_level.pre_tokenizer(name)).pre_tokenizer
    found = [word.replace("Ġ", " ") for word, _ in steps.pre_tokenize_str("I'LL pay 12345 dollars!!")]
    assert found == words


# tokenizer.json

CORPUS = ["the cat sat on the mat", "hello world, hello cat", "a b c d 1 2 3 <tool>"] * 20


def trained_byte_level() -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(CORPUS, trainer)
    library.add_tokens(["<tool>"])
    library.add_special_tokens([AddedToken("<|end|>", rstrip=True, special=True)])
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return library


def test_tokenizer_json(tmp_path):
    library = trained_byte_level()
    path = tmp_path / "tokenizer.json"
    library.save(str(path))
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "{{ messages }}"}
    tokenizer = Tokenizer.from_huggingface(path, config, eos_ids=[0])
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.chat_template) == (0, 1, "{{ messages }}")
    assert tokenizer.eos_ids == {0, 1, library.token_to_id("<|end|>")}
    for text in ("hello <tool> cat<|im_end|> x", "the<|end|>  mat", "é 你 \n", "", "<s>"):
        for special in (True, False):
            expected = library.encode(text, add_special_tokens=special).ids
            assert tokenizer.encode(text, add_special_tokens=special, parse_special=True) == expected
        ids = tokenizer.encode(text)
        assert tokenizer.special_ids.isdisjoint(ids)
        assert tokenizer.decode(ids) == text == library.decode(ids, skip_special_tokens=False)
    assert library.token_to_id("<tool>") in tokenizer.encode("<tool>")
    assert Tokenizer.from_huggingface(path, config, chat_template="x").chat_template == "x"
    with pytest.raises(ValueError, match="'<nope>' as bos_token"):
        Tokenizer.from_huggingface(path, {"bos_token": "<nope>"})


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_tokenizer_json_with_metaspace(scheme: str):
    """A space in front of the text only, of every stretch, or of none: also after a control token."""
    library = Library(models.BPE(byte_fallback=True, unk_token="<unk>"))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    alphabet = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<unk>", "<s>", "</s>", *alphabet], show_progress=False
    )
    library.train_from_iterator(CORPUS, trainer)
    state = Library.from_str(library.to_str())
    state.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
        + [decoders.Strip(" ", 1, 0)] * (scheme != "never")
    )
    source = json.loads(state.to_str())
    source["added_tokens"] = source["added_tokens"][:3]  # byte pieces are no added tokens in real files
    state = Library.from_str(json.dumps(source))
    tokenizer = Tokenizer.from_huggingface(source)
    for text in ("the cat", "the</s>cat sat", "</s> the", "é</s>é", "a", " a"):
        ids = tokenizer.encode(text, parse_special=True)
        assert ids == state.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids) == state.decode(ids, skip_special_tokens=False), text
        assert tokenizer.special_ids.isdisjoint(tokenizer.encode(text))


def test_tokenizer_json_without_fixed_bytes_is_refused():
    library = Library(models.WordLevel({"a": 0}, unk_token="a"))
    library.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="decoder of type WordPiece"):
        Tokenizer.from_huggingface(json.loads(library.to_str()))


def test_truncation_of_a_tokenizer_json_is_ignored():
    library = trained_byte_level()
    library.enable_truncation(3)
    tokenizer = Tokenizer.from_huggingface(json.loads(library.to_str()))
    text = "the cat sat on the mat" * 10
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_bytes_of_smollm2_are_exact(smollm2: Tokenizer):
    """The bytes of single tokens, put together by hand, are the text of the whole."""
    tokens = random.Random(1).sample(range(17, smollm2.vocab_size), 2000)
    joined = b"".join(smollm2.token_bytes(token) for token in tokens)
    assert joined.decode("utf-8", "replace") == smollm2.decode(tokens)


def test_nfc_where_the_model_wants_it():
    """Qwen's tokenizer.json normalises; its vocabulary has no decomposed letters to speak of."""
    vocabulary = {chr(char): byte for char, byte in byte_level.BYTE_OF.items()}
    backend = byte_level.build(vocabulary, [], byte_level.pre_tokenizer("qwen2"))
    assert bytes(backend.encode("e\u0301").ids).decode() == normalizers.NFC().normalize_str("e\u0301") == "é"
