"""The byte-level BPE of a GGUF file (`tokenizer.ggml.model = gpt2`), built for `tokenizers`.

Owns the choice of the words' rule by `tokenizer.ggml.pre`. Knows nothing about tokens matched
whole. Invariant: a rule that is not known exactly is an error, never a guess.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from ..errors import ModelLoadError, one_line
from .gguf_metadata import OTHER_TOKENIZER, TokenType, Vocabulary, read_merges
from .pre_tokenizers import PRE_TOKENIZERS, PreTokenizer


def build_bpe(metadata: Mapping[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """Without the tokens that are matched whole. ModelLoadError."""
    rule = pre_tokenizer(metadata)
    # UNUSED entries pad the embedding; left out, they can't be matched and decode to nothing.
    vocab = {
        token: token_id
        for token_id, (token, kind) in enumerate(vocabulary.entries())
        if kind != TokenType.UNUSED
    }
    backend = bpe(vocab, read_merges(metadata), ignore_merges=rule.ignore_merges)
    if rule.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = rule.splitter()
    backend.decoder = decoders.ByteLevel()
    return backend


def bpe(
    vocab: dict[str, int], merges: list[tuple[str, str]], **options: Any
) -> tokenizers.Tokenizer:
    """BPE alone. ModelLoadError."""
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges, **options))
    except Exception as error:  # `tokenizers` raises bare Exception
        raise ModelLoadError(
            f"GGUF: the tokenizer's merges don't fit its tokens: {one_line(error)}"
        ) from None


def pre_tokenizer(metadata: Mapping[str, Any]) -> PreTokenizer:
    """The rule that the file names. ModelLoadError."""
    name = metadata.get("tokenizer.ggml.pre")
    if name is None:
        raise ModelLoadError(
            "GGUF: expected tokenizer.ggml.pre (how text is cut into words), got a file without; "
            "an old converter made it: convert the model again, or name a tokenizer with "
            "--tokenizer"
        )
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        raise ModelLoadError(
            f"GGUF: expected tokenizer.ggml.pre to be one of {', '.join(sorted(PRE_TOKENIZERS))}, "
            f"got {name!r:.40}; {OTHER_TOKENIZER}"
        )
    return PRE_TOKENIZERS[name]
