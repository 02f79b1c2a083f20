"""A GGUF file under Hugging Face names: config, tensor names and row order.

Owns the translation that llama.cpp's converter made, backwards; what differs by architecture is
gguf_families.py's. The file format is gguf.py's; what the config means is models'. Invariant:
`config`, `shapes` and `chunks` answer as the Hugging Face folder the file was converted from would.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError
from .gguf import GGUFFile
from .gguf_families import Family, family_of, huggingface_name
from .gguf_rope import FACTORS_TENSOR, rope_parameters
from .reading import ROW_MULTIPLE, Bytes, RowRange

# config.json key -> metadata key after the architecture's name
CONFIG_KEYS = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
HEADS_REORDERED = {".q_proj.": "num_attention_heads", ".k_proj.": "num_key_value_heads"}

Rows = NDArray[Any]  # of values, or of bytes


class GGUFCheckpoint:
    """A `WeightSource` over one .gguf file."""

    def __init__(self, path: Path) -> None:
        self._file = GGUFFile(path)
        self._family = family_of(self._file.metadata, path)
        self._names = {
            huggingface_name(name, self._family, path): name
            for name in self._file.tensors
            if name != FACTORS_TENSOR
        }
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: self._file.tensors[own].shape for name, own in self._names.items()
        }
        self.config: Mapping[str, Any] = _config(self._file, self._family, self.shapes)

    def format(self, name: str) -> str:
        return self._file.tensors[self._names[name]].type

    def row_multiple(self, name: str) -> int:
        """Whole heads, where rows are restored head by head."""
        num_heads = self._num_reordered_heads(name)
        head_rows = self.shapes[name][0] // num_heads if num_heads else 1
        return math.lcm(ROW_MULTIPLE, head_rows)

    def chunks(self, name: str, rows: RowRange | None = None) -> Iterator[NDArray[Any]]:
        read = self._file.chunks(self._names[name], self.row_multiple(name), rows)
        return self._in_row_order(name, read)

    def blocks(self, name: str, rows: RowRange | None = None) -> Iterator[Bytes]:
        read = self._file.blocks(self._names[name], self.row_multiple(name), rows)
        return self._in_row_order(name, read)

    def _in_row_order(self, name: str, chunks: Iterator[Rows]) -> Iterator[Rows]:
        """In the order that the checkpoint had."""
        num_heads = self._num_reordered_heads(name)
        for rows in chunks:
            if num_heads:
                head_rows = self.shapes[name][0] // num_heads
                rows = _restore_row_order(rows, len(rows) // head_rows)
            yield rows

    def _num_reordered_heads(self, name: str) -> int:
        """In how many heads the converter permuted rows; 0: in none."""
        if self._family.pairs_neighbours:
            for projection, key in HEADS_REORDERED.items():
                if projection in name:
                    return int(self.config[key])
        return 0

    def identity(self) -> tuple[Any, ...]:
        return self._file.identity()

    def check_unchanged(self) -> None:
        self._file.check_unchanged()

    def close(self) -> None:
        self._file.close()


def _config(
    file: GGUFFile, family: Family, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Any]:
    """What the model's config.json would say."""
    metadata = file.metadata
    prefix = f"{metadata['general.architecture']}."
    config: dict[str, Any] = {
        key: metadata[prefix + own] for key, own in CONFIG_KEYS.items() if prefix + own in metadata
    }
    num_heads, hidden_size = config.get("num_attention_heads"), config.get("hidden_size")
    config.setdefault("num_key_value_heads", num_heads)
    if isinstance(num_heads, int) and num_heads > 0 and isinstance(hidden_size, int):
        head_dim = config.setdefault("head_dim", hidden_size // num_heads)
        rotated = metadata.get(f"{prefix}rope.dimension_count", head_dim)
        if rotated != head_dim:
            raise ModelLoadError(
                f"{file.path}: expected {prefix}rope.dimension_count to be the head size "
                f"{head_dim}, got {rotated!r:.100}"
            )
    tokens = metadata.get("tokenizer.ggml.tokens")
    return config | {
        "architectures": [family.architecture],
        "vocab_size": len(tokens) if isinstance(tokens, list) else None,
        "tie_word_embeddings": "lm_head.weight" not in shapes,
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.gate_proj.bias" in shapes,
        "rope_parameters": _rope_parameters(file),
    }


def _rope_parameters(file: GGUFFile) -> dict[str, Any]:
    has_factors = FACTORS_TENSOR in file.tensors
    pair_factors = file.read(FACTORS_TENSOR) if has_factors else None
    return rope_parameters(file.metadata, pair_factors, file.path)


def _restore_row_order(values: Rows, num_heads: int) -> Rows:
    """Undo llama.cpp's permutation of the rows of Q and K.

    Its rotary embedding pairs neighbours, so the converter interleaved each head's halves:
    [num_heads, half, 2, ...] in the file, [num_heads, 2, half, ...] in the checkpoint.
    """
    heads = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(values.shape)
