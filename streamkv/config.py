"""What the operator asked for: EngineConfig and ServerConfig, the one list of flags.

Flags (`--max-num-seqs`), environment names (`STREAMKV_MAX_NUM_SEQS`), keys of files, their help and
docs/flags.md all come from the fields below; nothing fills them in later. Facts about a checkpoint
are `models.ModelConfig`, what follows from both is a plan (`runner.kv_cache.KVCachePlan`).
Invariant: a Struct that was constructed has fields of their types and in their ranges.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .errors import ConfigError
from .fields import check_fields, flag_of

DEFAULT_MODEL = "smollm2-135m-instruct"


def http_url(host: str, port: int) -> str:
    """Of a server; an IPv6 address stands in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The model and how to run it."""

    model: Annotated[
        str,
        Meta(
            description="alias, folder in Hugging Face format, .gguf file, or hub id "
            "(org/name, org/name:Q4_K_M for one of its .gguf files)"
        ),
    ] = DEFAULT_MODEL
    tokenizer: Annotated[
        str,
        Meta(
            description="folder, .gguf file or hub id to take the tokenizer from (default: the "
            "model's)"
        ),
    ] = ""
    revision: Annotated[
        str, Meta(description="branch, tag or commit of a hub repository (default: main)")
    ] = ""
    download_dir: Annotated[
        str, Meta(description="folder for downloads from the hub (default: huggingface_hub's)")
    ] = ""
    chat_template: Annotated[
        str, Meta(description="file with the Jinja template to use instead of the checkpoint's")
    ] = ""
    tool_call_parser: Annotated[
        Literal[
            "auto",
            "hermes",
            "llama3_json",
            "llama4_json",
            "pythonic",
            "llama4_pythonic",
            "mistral",
        ],
        Meta(description="how the model writes calls of tools (auto: as its chat template tells)"),
    ] = "auto"
    generation_config: Annotated[
        Literal["auto", "vllm"],
        Meta(
            description="where requests' defaults come from: auto is the checkpoint's "
            "generation_config, vllm the API's own alone"
        ),
    ] = "auto"
    trust_remote_code: Annotated[
        bool, Meta(description="taken for compatibility: no code of a checkpoint is ever run")
    ] = False
    served_model_name: Annotated[
        tuple[str, ...],
        Meta(
            description="model id in the API; repeat for several (default: the string given as "
            "model)"
        ),
    ] = ()
    dtype: Annotated[
        Literal["auto", "bfloat16", "float32"],
        Meta(
            description="of weights that aren't quantized and of KV; auto is bfloat16, float32 "
            "computes in float32 throughout",
            extra={
                "same": {"float": "float32"},
                "advice": "nothing is computed in float16: auto reads checkpoints that have it",
            },
        ),
    ] = "auto"
    quantization: Annotated[
        Literal["auto", "none", "int8", "int4"],
        Meta(
            description="of weights: auto keeps the checkpoint's, none widens them to dtype, int8 "
            "and int4 quantize a checkpoint that isn't",
            extra={
                "short": "-q",
                "same": {"gguf": "auto"},
                "advice": "AWQ, GPTQ and FP8 checkpoints aren't read: give a .gguf file, or floats",
            },
        ),
    ] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "bfloat16", "float32", "int8"],
        Meta(
            description="of keys and values; auto is dtype, int8 has a scale a token and head",
            extra={"advice": "int8 is as small as fp8"},
        ),
    ] = "auto"
    device: Annotated[
        Literal["auto", "cpu", "cuda"], Meta(description="auto is cuda where there is one")
    ] = "auto"
    max_model_len: Annotated[
        int,
        Meta(
            ge=0,
            description="context length in tokens (0: the checkpoint's, or what memory allows)",
            extra={"same": {"auto": 0, "-1": 0}},
        ),
    ] = 0
    max_num_seqs: Annotated[int, Meta(ge=1, le=4096, description="sequences that run at once")] = (
        256
    )
    max_num_batched_tokens: Annotated[
        int, Meta(ge=1, description="tokens computed in one step; longer prompts go in chunks")
    ] = 512
    max_num_queued_reqs: Annotated[
        int, Meta(ge=1, description="waiting requests before new ones get 429")
    ] = 4096
    block_size: Annotated[int, Meta(ge=1, le=1024, description="tokens per KV block")] = 16
    gpu_memory_utilization: Annotated[
        float,
        Meta(
            gt=0,
            le=1,
            description="share of available memory that weights and KV cache may take; on a CPU "
            "the KV cache is 4 GiB at most, unless --kv-cache-memory-bytes says more",
        ),
    ] = 0.9
    kv_cache_memory_bytes: Annotated[
        int,
        Meta(
            ge=0,
            description="bytes for KV blocks, as 8G or 0.5G (0: planned from what is free, on a "
            "CPU 4 GiB at most)",
            extra={"also": ("kv_cache_memory",)},
        ),
    ] = 0
    num_gpu_blocks_override: Annotated[
        int, Meta(ge=0, description="KV blocks, whatever the memory (0: planned)")
    ] = 0
    swap_space: Annotated[
        float,
        Meta(
            ge=0,
            le=1 << 20,
            description="GiB of host memory for KV blocks that don't fit: of preempted sequences, "
            "and of prefixes",
            extra={"also": ("kv_offloading_size",)},
        ),
    ] = 0.0
    preemption_mode: Annotated[
        Literal["auto", "swap", "recompute"],
        Meta(
            description="what becomes of a preempted sequence's KV: swap moves it to --swap-space, "
            "recompute gives it up, auto is what costs less by measurement"
        ),
    ] = "auto"
    enable_prefix_caching: Annotated[
        bool, Meta(description="reuse the KV of equal prompt beginnings")
    ] = True
    session_memory: Annotated[
        float,
        Meta(
            ge=0,
            le=1,
            description="share of the KV blocks that requests' sessions (session_id) may keep from "
            "being evicted",
        ),
    ] = 0.25
    kv_cache_dir: Annotated[
        str,
        Meta(
            description="folder that keeps prefixes over restarts (default: none); host memory "
            "for the way there comes with it, up to 64 blocks or 256 MiB"
        ),
    ] = ""
    kv_cache_disk: Annotated[
        float, Meta(gt=0, le=1 << 20, description="GiB that --kv-cache-dir may take")
    ] = 8.0
    async_scheduling: Annotated[
        bool, Meta(description="send the next step while one runs (overlap depth 1)")
    ] = True
    ops: Annotated[
        Literal["auto", "native", "reference"],
        Meta(description="kernels: the C++ extension or plain torch; auto is native on a CPU"),
    ] = "auto"
    seed: Annotated[
        int,
        Meta(
            ge=-1,
            le=2**63 - 1,
            description="of the seeds that requests without one get (-1: others at each start)",
        ),
    ] = -1
    tensor_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="devices that share each layer; only 1 so far",
            extra={"short": "-tp"},
        ),
    ] = 1
    pipeline_parallel_size: Annotated[
        int,
        Meta(
            ge=1,
            description="devices that share the layers out; only 1 so far",
            extra={"short": "-pp"},
        ),
    ] = 1
    threads: Annotated[
        int, Meta(ge=0, le=1024, description="CPU threads that compute (0: one a physical core)")
    ] = 0
    packed_cache_gib: Annotated[
        float,
        Meta(
            ge=0,
            le=1 << 20,
            description="GiB of disk for packed weights, for quick starts (0: off)",
        ),
    ] = 16.0
    enforce_eager: Annotated[
        bool,
        Meta(description="run a model's operations one by one: the same bits, slower, to debug"),
    ] = False

    def __post_init__(self) -> None:
        check_fields(self)
        if "" in self.served_model_name:
            raise ConfigError(
                "served_model_name (--served-model-name): expected a name, got an empty one; "
                "leave it out to serve the model under its own"
            )
        if self.preemption_mode == "swap" and not self.swap_space:
            raise ConfigError(
                "preemption_mode (--preemption-mode): swap needs --swap-space, got 0 GiB; raise "
                "that (the host memory that --kv-cache-dir brings is for the way to the disk)"
            )
        if self.kv_cache_dir and not self.enable_prefix_caching:
            raise ConfigError(
                "kv_cache_dir (--kv-cache-dir): expected prefix caching, which is off; leave out "
                "one of --kv-cache-dir and --no-enable-prefix-caching"
            )
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if (size := getattr(self, name)) != 1:
                raise ConfigError(
                    f"{name} ({flag_of(name)}): expected 1, got {size}; a model "
                    "computes on one device so far: leave it out"
                )

    @property
    def model_id(self) -> str:
        """The first name that clients use."""
        return self.model_ids[0]

    @property
    def model_ids(self) -> tuple[str, ...]:
        """All names that clients use."""
        return tuple(dict.fromkeys(self.served_model_name)) or (self.model,)


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine is offered over the network."""

    host: Annotated[str, Meta(description="address to listen on (default: 127.0.0.1)")] = ""
    port: Annotated[int, Meta(ge=0, le=65535, description="port; 0 picks a free one")] = 8000
    api_key: Annotated[
        tuple[str, ...], Meta(description="key that clients must send; repeat for several")
    ] = ()
    allowed_origins: Annotated[
        tuple[str, ...],
        Meta(
            description="web origin (https://app.example) whose pages may use the API, over HTTP "
            "and WebSockets; repeat for several; * for all"
        ),
    ] = ()
    max_body_bytes: Annotated[
        int, Meta(ge=1024, description="largest request body or WebSocket message")
    ] = 16 * 1024 * 1024
    trust_request_chat_template: Annotated[
        bool, Meta(description="let requests bring a chat_template of their own")
    ] = False
    resume_window: Annotated[
        float,
        Meta(
            ge=0,
            le=86400,
            description="seconds that a resumable answer goes on without its reader, and stays "
            "after its end (0: nothing is resumable, and who leaves aborts)",
        ),
    ] = 60.0
    resume_memory_bytes: Annotated[
        int,
        Meta(
            ge=1 << 16,
            description="bytes for events of resumable answers, which clients that lost their "
            "connection may ask for again; one answer keeps the last sixteenth of it at most",
        ),
    ] = 64 * 1024 * 1024
    response_store_mib: Annotated[
        float,
        Meta(
            ge=0,
            le=1 << 20,
            description="MiB of memory for responses that clients come back to, by their id or as "
            "previous_response_id; the oldest go first (0: none is stored)",
        ),
    ] = 256.0
    response_store_ttl: Annotated[
        float,
        Meta(ge=0, description="seconds that a stored response is kept after its end"),
    ] = 86400.0
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Meta(description="lines of the log that are written: these and more serious ones"),
    ] = "info"

    def __post_init__(self) -> None:
        check_fields(self)
        if any(not key or key != key.strip() for key in self.api_key):
            raise ConfigError(
                "--api-key (STREAMKV_API_KEY): expected a key without spaces around it, got an "
                "empty or padded one; set the variable it comes from, or leave the flag out"
            )

    @property
    def bind_host(self) -> str:
        return self.host or "127.0.0.1"
