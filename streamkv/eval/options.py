"""What can be asked of an evaluation: one Struct, whose fields become flags (flags.py).

Imports nothing heavy: the command line reads it for `--help`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

SAME = "float32"  # against: the model's own numbers
NOTHING = "none"

# Of EngineConfig: the rest is fixed by what an evaluation is, or a list below.
ENGINE_FLAGS = (
    *("model", "download_dir", "block_size", "threads", "gpu_memory_utilization"),
    "packed_cache_gib",
)


class EvalConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The text, the ways to run the model, and what they are compared with."""

    text: Annotated[
        str, Meta(description="UTF-8 file to predict (default: the help texts of Python)")
    ] = ""
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 20, description="tokens of it to predict")] = 4096
    context: Annotated[
        int,
        Meta(ge=2, le=1 << 20, description="tokens in a window; each moves on by half of that"),
    ] = 1024
    greedy_tokens: Annotated[
        int, Meta(ge=0, le=4096, description="tokens of each greedy continuation (0: none)")
    ] = 32
    dtype: Annotated[
        tuple[Literal["auto", "bfloat16", "float32"], ...],
        Meta(description="as in serve; repeat for several"),
    ] = ()
    quantization: Annotated[
        tuple[Literal["auto", "none", "int8", "int4"], ...],
        Meta(description="as in serve; repeat for several"),
    ] = ()
    kv_cache_dtype: Annotated[
        tuple[Literal["auto", "bfloat16", "float32", "int8"], ...],
        Meta(description="as in serve; repeat for several"),
    ] = ()
    compare: Annotated[
        bool, Meta(description="every quantization and KV type that the checkpoint allows")
    ] = False
    also: Annotated[
        tuple[str, ...],
        Meta(description="another checkpoint of the same tokens, as it is; repeat for several"),
    ] = ()
    against: Annotated[
        str,
        Meta(
            description="what ratio, KL and agreement refer to: float32 (the same checkpoint, "
            "widened), another checkpoint, or none"
        ),
    ] = SAME
    transformers: Annotated[
        bool, Meta(description="also transformers in float32, on the same weights (needs torch)")
    ] = False
    json: Annotated[bool, Meta(description="end with a JSON document, one line")] = False
