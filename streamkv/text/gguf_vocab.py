"""GGUF metadata → `tokenizers` tokenizer.

Owns the choice of the tokenizer's model, the tokens that are matched whole and those put around a
text. Knows nothing about the file format: it reads a metadata mapping. Invariant: ids are the
positions in `tokenizer.ggml.tokens`; a kind of tokenizer that is not known exactly is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import processors

from ..errors import ModelLoadError, one_line
from .gguf_bpe import build_bpe, pre_tokenizer
from .gguf_metadata import (
    OTHER_TOKENIZER,
    TokenType,
    Vocabulary,
    flag,
    read_vocabulary,
    special_id,
)
from .gguf_spm import build_spm, spell


def build_backend(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """A `tokenizers` tokenizer from the `tokenizer.*` keys. ModelLoadError.

    A tokenizer.json in the metadata is used as it stands.
    """
    source = metadata.get("tokenizer.huggingface.json")
    if source is not None:
        return _from_json(source)
    match metadata.get("tokenizer.ggml.model"):
        case "gpt2":
            vocabulary = read_vocabulary(metadata)
            backend = build_bpe(metadata, vocabulary)
            adds_bos = pre_tokenizer(metadata).add_bos
        case "llama":
            vocabulary = spell(read_vocabulary(metadata))
            backend = build_spm(metadata, vocabulary)
            adds_bos = True
        case model:
            raise ModelLoadError(
                "GGUF: expected tokenizer.ggml.model = gpt2 (byte-level BPE) or llama "
                f"(SentencePiece BPE), got {model!r:.100}; {OTHER_TOKENIZER}"
            )
    _add_literal_tokens(backend, vocabulary)
    size = len(vocabulary.tokens)
    first = special_id(metadata, "bos", size) if flag(metadata, "add_bos_token", adds_bos) else None
    last = special_id(metadata, "eos", size) if flag(metadata, "add_eos_token", False) else None
    _put_around(backend, vocabulary.tokens, first, last)
    return backend


def vocab_size(metadata: Mapping[str, Any], backend: tokenizers.Tokenizer) -> int:
    """How many ids the tokenizer has that `build_backend` built; some may be unused."""
    if "tokenizer.huggingface.json" in metadata:
        return max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    return len(metadata["tokenizer.ggml.tokens"])


def _from_json(source: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelLoadError(
            "GGUF: expected tokenizer.huggingface.json to be a tokenizer.json, got "
            f"{one_line(error)}"
        ) from None


def _add_literal_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Tokens matched as they stand in the text, before BPE; control tokens are special."""
    special, user_defined = [], []
    for token, kind in vocabulary.entries():
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(tokenizers.AddedToken(token, special=True, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            user_defined.append(tokenizers.AddedToken(token, special=False, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(user_defined)


def _put_around(
    backend: tokenizers.Tokenizer, tokens: list[str], first: int | None, last: int | None
) -> None:
    """Let each text begin and end with these tokens."""
    before = [] if first is None else [tokens[first]]
    after = [] if last is None else [tokens[last]]
    if before or after:
        named = {tokens[token_id]: token_id for token_id in (first, last) if token_id is not None}
        backend.post_processor = processors.TemplateProcessing(
            single=[*before, "$A", *after],
            pair=[*before, "$A", "$B", *after],
            special_tokens=list(named.items()),
        )
