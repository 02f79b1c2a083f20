"""GGUF vocabulary → `tokenizers` tokenizer: the byte-level BPE of `tokenizer.ggml.model = gpt2`.

Owns the table of pre-tokenizers. Knows nothing about the file format: it reads a metadata mapping.
Invariant: a pre-tokenizer it has no exact rule for is an error, never a guess, because a wrong
split gives plausible tokens that the model was not trained on.

Each rule is a chain of patterns, applied one after the other; a pattern cuts every piece into its
matches and what lies between them. The patterns are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum
from typing import Any, NamedTuple

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ..errors import ModelLoadError

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_WORDS = _LLAMA3_WORDS.replace("{1,3}", "")


class PreTokenizer(NamedTuple):
    """How text is cut before BPE runs inside each piece."""

    patterns: tuple[str, ...]
    single_digits: bool = False  # every digit (Unicode's Nd, Nl, No) is cut off first
    nfc: bool = False  # the text is normalized to NFC first
    ignore_merges: bool = False  # a piece that is a token as a whole is not built by merges
    add_bos: bool = False  # when the file doesn't say


_GPT2 = PreTokenizer((_GPT2_WORDS,))
_SINGLE_DIGITS = PreTokenizer((_GPT2_WORDS,), single_digits=True)
_LLAMA3 = PreTokenizer((_LLAMA3_WORDS,), ignore_merges=True, add_bos=True)
_QWEN2 = PreTokenizer((_QWEN2_WORDS,), nfc=True)

PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _GPT2,
    "phi-2": _GPT2,
    "smollm": _SINGLE_DIGITS,
    "starcoder": _SINGLE_DIGITS,
    "refact": _SINGLE_DIGITS,
    "codeshell": _SINGLE_DIGITS,
    "llama-bpe": _LLAMA3,
    "llama-v3": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": _QWEN2,
}


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer from the `tokenizer.ggml.*` keys. ModelLoadError."""
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelLoadError(
            f"GGUF: expected tokenizer.ggml.model = gpt2 (byte-level BPE), got {model!r}; "
            "use the model's folder in Hugging Face format instead"
        )
    rule = _pre_tokenizer(str(metadata.get("tokenizer.ggml.pre", "default")))
    tokens, types = _tokens(metadata)
    backend = tokenizers.Tokenizer(_bpe(metadata, tokens, types, rule))
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(_splits(rule))
    backend.decoder = decoders.ByteLevel()
    _add_literal_tokens(backend, tokens, types)
    bos_id = metadata.get("tokenizer.ggml.bos_token_id")
    if _adds_bos(metadata, rule) and bos_id is not None:
        bos = tokens[token_index(bos_id, len(tokens), "tokenizer.ggml.bos_token_id")]
        backend.post_processor = processors.TemplateProcessing(
            single=[bos, "$A"], pair=[bos, "$A", "$B"], special_tokens=[(bos, bos_id)]
        )
    return backend


def token_index(value: Any, num_tokens: int, key: str) -> int:
    """`value` as a token id below `num_tokens`. ModelLoadError naming the key: also for -1, since
    a file without such a token leaves the key out."""
    if type(value) is not int or not 0 <= value < num_tokens:  # bool is no id
        raise ModelLoadError(
            f"GGUF: expected {key} to be a whole number below {num_tokens} tokens, "
            f"got {value!r:.100}"
        )
    return value


def _adds_bos(metadata: Mapping[str, Any], rule: PreTokenizer) -> bool:
    adds = metadata.get("tokenizer.ggml.add_bos_token", rule.add_bos)
    if not isinstance(adds, bool):
        raise _unexpected("add_bos_token", "true or false", adds)
    return adds


def _list_of(kind: type, name: str, value: Any) -> list[Any]:
    """`value`, if it is a list of that kind and nothing else (bool is no int). ModelLoadError."""
    if not isinstance(value, list) or any(type(item) is not kind for item in value):
        raise _unexpected(name, f"a list of {kind.__name__}", value)
    return value


def _unexpected(name: str, expected: str, got: Any) -> ModelLoadError:
    return ModelLoadError(
        f"GGUF: expected tokenizer.ggml.{name} to be {expected}, got {got!r:.100}; "
        "convert the model again"
    )


def _pre_tokenizer(name: str) -> PreTokenizer:
    if name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"GGUF: expected tokenizer.ggml.pre to be one of {', '.join(sorted(PRE_TOKENIZERS))}, "
            f"got {name!r}; use the model's folder in Hugging Face format instead"
        )
    return PRE_TOKENIZERS[name]


def _splits(rule: PreTokenizer) -> list[pre_tokenizers.PreTokenizer]:
    digits = [pre_tokenizers.Digits(individual_digits=True)] if rule.single_digits else []
    words = [
        pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated") for pattern in rule.patterns
    ]
    return [*digits, *words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]


def _tokens(metadata: Mapping[str, Any]) -> tuple[list[str], list[int]]:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if tokens is None or "tokenizer.ggml.merges" not in metadata:
        raise ModelLoadError(
            "GGUF: expected tokenizer.ggml.tokens and tokenizer.ggml.merges, got a file without; "
            "it holds no tokenizer: convert the model again"
        )
    _list_of(str, "tokens", tokens)
    types = metadata.get("tokenizer.ggml.token_type")
    if types is None:
        types = [int(TokenType.NORMAL)] * len(tokens)
    if len(_list_of(int, "token_type", types)) != len(tokens):
        raise ModelLoadError(f"GGUF: expected {len(tokens)} token types, got {len(types)}")
    return tokens, types


def _bpe(
    metadata: Mapping[str, Any], tokens: list[str], types: list[int], rule: PreTokenizer
) -> models.BPE:
    # UNUSED entries pad the embedding; left out, they can't be matched and decode to nothing.
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(zip(tokens, types, strict=True))
        if kind != TokenType.UNUSED
    }
    merges = []
    for merge in _list_of(str, "merges", metadata["tokenizer.ggml.merges"]):
        left, _, right = merge.partition(" ")
        merges.append((left, right))
    try:
        return models.BPE(vocab=vocab, merges=merges, ignore_merges=rule.ignore_merges)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelLoadError(
            f"GGUF: the tokenizer's merges don't fit its tokens: {error}"
        ) from None


def _add_literal_tokens(backend: tokenizers.Tokenizer, tokens: list[str], types: list[int]) -> None:
    """Tokens matched as they stand in the text, before BPE; control tokens are special."""
    special, user_defined = [], []
    for token, kind in zip(tokens, types, strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            user_defined.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)
