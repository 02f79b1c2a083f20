"""What a GGUF file says about rotary positions, as config.json's `rope_parameters`.

Owns the translation from llama.cpp's keys and its tensor of factors. What the parameters mean is
models/rope.py's. Invariant: an answer makes the same angles as llama.cpp does; what it can't say
is a ModelLoadError, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelLoadError

FACTORS_TENSOR = "rope_freqs.weight"
PLAIN_FACTORS = (0, 1)
# YaRN's parameters in config.json -> their keys here, after "ARCHITECTURE.rope.scaling."
YARN_KEYS = {
    "original_max_position_embeddings": "original_context_length",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Such keys that change the angles in ways that config.json has no words for -> the values that
# change nothing.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = {
    "attn_factor": (1,),
    "yarn_attn_factor": (1,),
    "yarn_ext_factor": (1,),
    "yarn_log_multiplier": (0,),
}


def rope_parameters(
    metadata: Mapping[str, Any], pair_factors: NDArray[np.float32] | None, path: Path
) -> dict[str, Any]:
    """{} for plain positions. `pair_factors` are the file's FACTORS_TENSOR, if it has one."""
    rope = f"{metadata['general.architecture']}.rope."
    prefix = f"{rope}scaling."
    for key, neutral in NEUTRAL_VALUES.items():
        if metadata.get(prefix + key, neutral[0]) not in neutral:
            raise _unsupported(path, f"{prefix}{key} is {metadata[prefix + key]!r:.100}")
    # The factor counts without a type too; scale_linear is what older converters called it.
    kind = metadata.get(f"{prefix}type", "linear")
    factor = metadata.get(f"{prefix}factor", metadata.get(f"{rope}scale_linear", 0))
    if kind not in ("none", "linear", "yarn"):
        raise _unsupported(path, f"{prefix}type is {kind!r:.100}")
    is_plain = kind == "none" or (not isinstance(factor, bool) and factor in PLAIN_FACTORS)
    if pair_factors is not None:
        if not is_plain:
            raise _unsupported(path, f"it has {FACTORS_TENSOR} and {prefix}factor {factor!r:.100}")
        # Which formula made the factors isn't in the file; a list of them is LongRoPE's form.
        factors = pair_factors.tolist()
        return {
            "rope_type": "longrope",
            "short_factor": factors,
            "long_factor": factors,
            "attention_factor": 1.0,
        }
    if is_plain:
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    found = {
        key: metadata[prefix + own] for key, own in YARN_KEYS.items() if prefix + own in metadata
    }
    return {"rope_type": "yarn", "factor": factor} | found


def _unsupported(path: Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"{path}: these scaled rotary embeddings are not supported ({reason})")
