"""What can be asked of the benchmarks: one Struct each, whose fields become flags (flags.py).

Imports nothing heavy: the command line reads it for `--help`.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError

Length = Annotated[int, Meta(ge=1, le=1 << 20)]


class LoadConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Closed loops through AsyncEngine: `concurrency` streams, each sends its next request when
    its last one ended."""

    concurrency: Annotated[
        tuple[Length, ...], Meta(description="streams at once; one or several")
    ] = (1, 8, 32)
    input_len: Annotated[tuple[Length, ...], Meta(description="prompt tokens; one or several")] = (
        128,
    )
    output_len: Annotated[Length, Meta(description="tokens generated for each request")] = 128
    shared_prefix_len: Annotated[
        int, Meta(ge=0, description="prompt tokens that all requests of a round share")
    ] = 0
    requests_per_stream: Annotated[Length, Meta(description="in a round")] = 2
    rounds: Annotated[Length, Meta(description="medians are taken over rounds")] = 3
    prompt_seed: Annotated[int, Meta(ge=0, description="of the prompts (0: new in each run)")] = 0

    def __post_init__(self) -> None:
        if self.shared_prefix_len >= min(self.input_len):
            raise ConfigError(
                f"--shared-prefix-len: expected less than --input-len, {min(self.input_len)}, "
                f"got {self.shared_prefix_len}"
            )


class LatencyConfig(LoadConfig, frozen=True, kw_only=True):
    """The same loops, seen by one stream among few."""

    concurrency: Annotated[
        tuple[Length, ...], Meta(description="streams at once; one or several")
    ] = (1,)
    input_len: Annotated[tuple[Length, ...], Meta(description="prompt tokens; one or several")] = (
        32,
        128,
        512,
        1800,
    )
    output_len: Annotated[Length, Meta(description="tokens generated for each request")] = 32


class OfflineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Batches through LLM.generate."""

    num_prompts: Annotated[Length, Meta(description="prompts of a batch")] = 50
    input_len: Annotated[Length, Meta(description="tokens of each prompt")] = 128
    output_len: Annotated[Length, Meta(description="tokens generated for each prompt")] = 64
    rounds: Annotated[Length, Meta(description="medians are taken over rounds")] = 3
    prompt_seed: Annotated[int, Meta(ge=0, description="of the prompts (0: new in each run)")] = 0
    transformers: Annotated[
        bool,
        Meta(description="beside it: transformers' generate on the same folder, prompt by prompt"),
    ] = False
    transformers_dtype: Annotated[
        Literal["float32", "bfloat16"],
        Meta(description="of transformers"),
    ] = "float32"


class StartupConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Fresh processes, one after the other."""

    runs: Annotated[Length, Meta(description="processes started")] = 3
    input_len: Annotated[Length, Meta(description="tokens of the first prompt")] = 16


class BlocksConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The books of KV blocks, without a model."""

    num_blocks: Annotated[
        tuple[Length, ...], Meta(description="blocks of a pool; one or several")
    ] = (10_000, 100_000, 1_000_000)
    sequences: Annotated[
        int, Meta(ge=1, le=4096, description="that run, a token each in a step")
    ] = 256
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens of a block")] = 16
    steps: Annotated[Length, Meta(description="in a round")] = 1000
    rounds: Annotated[Length, Meta(description="medians are taken over rounds")] = 3


BLOCKS_COLUMNS = (
    "In each step one sequence ends and one comes. Columns are medians, in microseconds a step: "
    "step: all of it; 99 %: what only 1 step in 100 exceeds; grow: blocks for tokens to come; "
    "publish: full blocks can be found by others; arrive: the new prompt is looked up and gets its "
    "blocks; leave: the blocks of what ended are cached; copies: the step's copies of blocks are "
    "made. A pool whose step takes 100 us at most has met the target."
)


class FaceConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A server without a model, and a client that counts."""

    api: Annotated[
        tuple[Literal["chat", "completions", "responses-ws"], ...],
        Meta(description="what is asked for; one or several"),
    ] = ("chat", "completions", "responses-ws")
    streams: Annotated[int, Meta(ge=1, le=4096, description="at once")] = 256
    connections: Annotated[
        int, Meta(ge=0, le=4096, description="WebSockets that share them (0: one a stream)")
    ] = 0
    step_ms: Annotated[
        float, Meta(gt=0, le=1000, description="that the device takes for a token of every stream")
    ] = 10.0
    output_len: Annotated[
        int, Meta(ge=16, le=3072, description="tokens generated for each request")
    ] = 512
    rounds: Annotated[Length, Meta(description="medians are taken over rounds")] = 3


class StepsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Steps to try a program with."""

    decode_rows: Annotated[
        tuple[Length, ...], Meta(description="a step of so many rows, a token each; one or several")
    ] = (1, 8, 32)
    prompt_len: Annotated[
        tuple[Length, ...],
        Meta(description="a step of one prompt of so many tokens; one or several"),
    ] = (512,)
    context: Annotated[Length, Meta(description="tokens that each row has after the step")] = 256
    rounds: Annotated[Length, Meta(description="medians are taken over rounds")] = 5


class InfoConfig(StepsConfig, frozen=True, kw_only=True):
    """What to say about a model."""

    program: Annotated[bool, Meta(description="the ops of the steps and what they cost")] = False
    profile: Annotated[
        bool, Meta(description="load the model and measure the steps, beside the machine's limits")
    ] = False


class KernelsConfig(StepsConfig, frozen=True, kw_only=True):
    """A model of random weights, op by op, beside what the machine can do."""

    tune: Annotated[
        bool,
        Meta(description="find what suits this machine best, and keep it for later starts"),
    ] = False
    dtype: Annotated[
        Literal["bfloat16", "float32"], Meta(description="of weights that aren't quantized and KV")
    ] = "bfloat16"
    weight_format: Annotated[
        Literal["none", "int8", "Q4_0", "Q4_1", "Q8_0"],
        Meta(description="of quantized matrices (none: of dtype)"),
    ] = "none"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8"],
        Meta(description="of keys and values; auto is dtype"),
    ] = "auto"
    shape: Annotated[
        Literal["small", "large"],
        Meta(description="that of a model of 135 million parameters, or of 1.1 billion"),
    ] = "small"
    isa: Annotated[str, Meta(description="instruction set (default: the best there is)")] = ""
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="CPU threads (0: one a physical core)")
    ] = 0
