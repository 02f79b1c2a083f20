"""Tiny models made on the spot: a byte-level BPE tokenizer and a random checkpoint.

Nothing is downloaded. Everything is the same on every run.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any, Literal

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from streamkv.text.gguf_vocab import build_backend
from streamkv.text.token_bytes import byte_level_alphabet
from streamkv.text.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CORPUS = (
    "the quick brown fox jumps over the lazy dog and then the other dog sleeps in the sun "
    "while the streaming server sends tokens to the client and the client shows the words "
    "user assistant system what is the answer to this question it is that these are those "
)
_NUM_MERGES = 80


def tiny_gguf_metadata(**overrides: Any) -> dict[str, Any]:
    """`tokenizer.ggml.*` keys: 3 control tokens, 256 bytes, 80 merges; 339 tokens in all.

    Ids: 0 <|endoftext|> (unknown, padding), 1 <|im_start|> (beginning), 2 <|im_end|> (end).
    """
    alphabet = sorted(byte_level_alphabet(), key=byte_level_alphabet().__getitem__)
    merges = _learn_merges()
    tokens = [*SPECIAL_TOKENS, *alphabet, *("".join(pair) for pair in merges)]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.padding_token_id": 0,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHATML,
    } | overrides


def tiny_tokenizer(**overrides: Any) -> Tokenizer:
    """A byte-level BPE tokenizer of 339 tokens with a ChatML template; it encodes any text."""
    return Tokenizer.from_gguf(tiny_gguf_metadata(**overrides))


def _learn_merges() -> list[tuple[str, str]]:
    """Byte pair encoding, trained on a few words: the most frequent pair, over and over."""
    words = [["\u0120", *word] for word in _CORPUS.split()]  # U+0120 is the space's stand-in
    merges: list[tuple[str, str]] = []
    while len(merges) < _NUM_MERGES:
        pairs = Counter(pair for word in words for pair in zip(word, word[1:], strict=False))
        best = max(pairs, key=lambda pair: (pairs[pair], pair))
        merges.append(best)
        for word in words:
            index = 0
            while index < len(word) - 1:
                if (word[index], word[index + 1]) == best:
                    word[index : index + 2] = ["".join(best)]
                index += 1
    return merges


def sentencepiece_backend(kind: Literal["llama", "gemma", "metaspace"]) -> tokenizers.Tokenizer:
    """A small SentencePiece-style BPE: marks for spaces, byte tokens, a few merges.

    Ids: 0 <unk>, 1 <s>, 2 </s>. `metaspace` decodes no byte tokens.
    """
    chars = ["\u2581", *"abcdefghijklmnopqrstuvwxyz", "é"]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["he", "\u2581he", "\u2581\u2581"]
    vocab = {t: i for i, t in enumerate(["<unk>", "<s>", "</s>", *byte_tokens, *chars, *words])}
    merges = [("h", "e"), ("\u2581", "he"), ("\u2581", "\u2581")]
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True)
    backend = tokenizers.Tokenizer(bpe)
    replace = decoders.Replace("\u2581", " ")
    if kind == "llama":
        backend.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        )
        steps = [replace, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        backend.decoder = decoders.Sequence(steps)
    elif kind == "gemma":
        backend.normalizer = normalizers.Replace(" ", "\u2581")
        backend.decoder = decoders.Sequence([replace, decoders.ByteFallback(), decoders.Fuse()])
    else:
        backend.pre_tokenizer = pre_tokenizers.Metaspace()
        backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(["<s>", "</s>", "<a\u2581mark>"])
    return backend


def save_tiny_checkpoint(
    path: Path, *, architecture: str = "LlamaForCausalLM", **config: Any
) -> Path:
    """Write a random model in Hugging Face format to the folder `path`, and return it.

    `config` are fields of the architecture's config over these: 2 layers, hidden 32, 4 heads,
    2 KV heads, MLP 64, vocabulary of the tiny tokenizer, context 256, tied embeddings, float32.
    """
    import torch
    import transformers

    fields: dict[str, Any] = {
        "vocab_size": tiny_tokenizer().vocab_size,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    } | config
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model_type = getattr(transformers, architecture)
        model = model_type(model_type.config_class(**fields))
        _scale_weights(model)
    model.generation_config = transformers.GenerationConfig(
        bos_token_id=1, eos_token_id=[2, 0], pad_token_id=0
    )
    model.save_pretrained(path)
    save_tiny_tokenizer(path)
    return path


def _scale_weights(model: Any) -> None:
    """Freshly initialized weights make every next token about as likely; larger ones give a
    distribution with a clear argmax, which rounding to bfloat16 rarely moves. Biases start at
    zero and norms of heads at one, which would hide that they are missing."""
    import torch

    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("bias"):
                weight.normal_()
            elif name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.normal_(1.0, 0.3)
            elif "norm" not in name:
                weight.mul_(40.0 if "embed" in name or "lm_head" in name else 14.0)


def save_tiny_tokenizer(path: Path) -> None:
    """Write the tokenizer's part of a checkpoint to the folder."""
    build_backend(tiny_gguf_metadata()).save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<|im_start|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|endoftext|>",
                "chat_template": CHATML,
            }
        ),
        encoding="utf-8",
    )
