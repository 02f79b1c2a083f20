"""Options of vLLM that have no counterpart here, so that scripts written for it start unchanged.

Owns, for each, the values that ask for what streamkv does anyway, and what to do instead of the
others. Invariant: an option either changes nothing in what is answered, or is refused by name.
Options that both have are fields of EngineConfig and ServerConfig, some under several names.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from .config import EngineConfig, ServerConfig
from .errors import ConfigError, one_line
from .fields import flag_of, guess

Kind = Literal["switch", "value", "list"]  # how its flag is written

ANY = "any"
OFF = "false 0"
SHORT = {  # besides the long flags
    "compilation_config": "-O",
    "data_parallel_size": "-dp",
    "enable_expert_parallel": "-ep",
    "speculative_config": "-sc",
}
SECRETS = ("hf_token",)  # values that no message shows
_LEFT_OUT = ("", "none", "null", "{}", "[]")


class Option(NamedTuple):
    """What becomes of an option of vLLM."""

    kind: Kind
    neutral: tuple[str, ...]  # values that change nothing, in lower case, besides _LEFT_OUT
    advice: str  # what to do instead of giving others; of one that takes ANY: why it does

    @property
    def takes_any(self) -> bool:
        return self.neutral == (ANY,)


def check(given: Mapping[str, Any]) -> None:
    """ConfigError for a value that asks for something else, and for a name that nobody knows, or
    that only a server has. Names are those of Python; None is an option that was left out."""
    for name, value in given.items():
        option = OPTIONS.get(name)
        if option is None:
            raise ConfigError(_unknown(name))
        if option.takes_any or (words := _plain(value)) in _LEFT_OUT or words in option.neutral:
            continue
        expected = " or ".join(option.neutral) or "none"
        got = "" if name in SECRETS else f", got {_short(value)}"
        raise ConfigError(f"{name} ({flag_of(name)}): expected {expected}{got}; {option.advice}")


def _plain(value: Any) -> str:
    """A value of Python as a flag would have it."""
    if isinstance(value, list | tuple | set | frozenset):
        return ",".join(map(_plain, value))
    text = str(value).strip().lower()
    return text.removesuffix(".0") if isinstance(value, float) else text


def _short(value: Any) -> str:
    return one_line(str(value).lower() if isinstance(value, bool) else value, 40)


def _unknown(name: str) -> str:
    if name in ServerConfig.__struct_fields__:
        return f"{name} ({flag_of(name)}) is an option of `streamkv serve`: leave it out here"
    hint = guess(name, (*EngineConfig.__struct_fields__, *OPTIONS)) or "docs/flags.md lists them"
    return f"expected an option of streamkv or of vLLM, got {name}: {hint}"


GENERATES = "models here generate text"
_TEXT_ONLY = "models here read text alone"
_IN_CONFIG = "change config.json in a copy of the checkpoint's folder"
_TUNES_VLLM = "it tunes vLLM's own machinery"
_BOUNDS = "--max-num-batched-tokens and --max-num-queued-reqs bound what is taken"
_EACH_REQUEST = "each request says for itself what its answer is to match: leave it out"
_NO_ADAPTERS = "adapters aren't loaded: merge them into the checkpoint"
_NO_SPECULATION = "there is no speculative decoding: leave it out"
_NO_PLUGINS = "no code is taken from outside: leave it out"
_NO_TLS = "the server speaks plain HTTP: let a proxy in front speak TLS"
_ONE_DEVICE = "one process computes on one device: start several servers behind a proxy"
_NO_TRANSFER = "blocks stay in one process: leave it out"
_NOTHING_LOGGED = "requests aren't logged"
_NO_REQUEST_LOG = "requests aren't logged one by one: /metrics has their numbers"
_NO_TRACES = "there are no traces: /metrics has counters and latencies"
_NEEDS_ADAPTERS = "it matters with adapters alone"
_NEEDS_SPECULATION = "it matters with speculative decoding alone"
_NEEDS_DEVICES = "it matters with several devices alone"

# Kind, neutral values, advice, names.
_ROWS: tuple[tuple[Kind, str, str, str], ...] = (
    # The model.
    ("value", "auto generate", GENERATES, "task runner"),
    ("value", "auto", GENERATES, "convert"),
    (
        "value",
        "auto hf safetensors gguf",
        "weights are read from safetensors and GGUF files: convert them",
        "load_format",
    ),
    ("value", "auto hf", "a folder's config.json says what a model is", "config_format"),
    ("value", "auto vllm", "each architecture has one implementation here", "model_impl"),
    (
        "value",
        "auto hf",
        "a checkpoint has one tokenizer: --tokenizer names another",
        "tokenizer_mode",
    ),
    (
        "value",
        "main",
        "--revision is of all files of the model's repository; of another one, give the page: "
        "--tokenizer https://huggingface.co/ORG/NAME/tree/REVISION",
        "tokenizer_revision",
    ),
    ("value", ANY, "no code of a checkpoint is ever run", "code_revision"),
    ("switch", OFF, "text needs a tokenizer: --tokenizer names one", "skip_tokenizer_init"),
    ("value", "true false", "set the variable HF_TOKEN to it", "hf_token"),
    (
        "value",
        "",
        _IN_CONFIG,
        "hf_overrides hf_config_path rope_scaling rope_theta model_class_overrides",
    ),
    (
        "value",
        "",
        "--quantization knows int8 and int4",
        "quantization_config quantization_param_path",
    ),
    (
        "value",
        "",
        "put the values into generation_config.json, or into requests",
        "override_generation_config",
    ),
    (
        "value",
        "",
        "there is nothing to set about loading: leave it out",
        "model_loader_extra_config",
    ),
    ("list", ANY, "only what is needed is fetched", "ignore_patterns"),
    (
        "value",
        ANY,
        "how weights are read is chosen here",
        "pt_load_map_location safetensors_load_strategy max_parallel_loading_workers",
    ),
    ("switch", ANY, "only a terminal gets a bar", "use_tqdm_on_load"),
    # Memory and steps.
    (
        "value",
        "0",
        "weights stay where they compute: leave it out; --swap-space is for KV",
        "cpu_offload_gb",
    ),
    ("value", "native", "--swap-space and --kv-cache-dir keep KV", "kv_offloading_backend"),
    (
        "switch",
        "true",
        "longer prompts than --max-num-batched-tokens go in chunks: raise it to have them whole",
        "enable_chunked_prefill",
    ),
    (
        "switch",
        ANY,
        "a model whose layers attend to a window has its context capped to it",
        "disable_sliding_window",
    ),
    (
        "value",
        "0 1",
        "chunks are as long as --max-num-batched-tokens allows",
        "long_prefill_token_threshold max_num_partial_prefills max_long_partial_prefills",
    ),
    ("value", "", _BOUNDS, "max_num_scheduled_tokens max_num_queued_tokens max_num_active_seqs"),
    (
        "value",
        "fcfs priority",
        "requests of equal priority run in order of arrival",
        "scheduling_policy",
    ),
    ("value", ANY, "prefixes are compared token by token", "prefix_caching_hash_algo"),
    ("switch", ANY, "int8 keys and values always have scales of their own", "calculate_kv_scales"),
    ("value", "1", "every token is sent when it is there", "stream_interval"),
    ("switch", OFF, "weights and KV stay in memory: leave it out", "enable_sleep_mode"),
    (
        "value",
        ANY,
        _TUNES_VLLM,
        "num_lookahead_slots num_scheduler_steps scheduler_delay_factor "
        "max_seq_len_to_capture max_context_len_to_capture tokenizer_pool_size "
        "tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers "
        "compilation_config optimization_level performance_mode "
        "max_cudagraph_capture_size attention_config attention_backend kernel_config "
        "linear_backend moe_backend mamba_cache_dtype mamba_ssm_cache_dtype "
        "mamba_block_size mamba_cache_mode watermark",
    ),
    ("list", ANY, _TUNES_VLLM, "cudagraph_capture_sizes"),
    (
        "switch",
        ANY,
        _TUNES_VLLM,
        "use_v2_block_manager multi_step_stream_outputs disable_async_output_proc "
        "disable_custom_all_reduce disable_cascade_attn disable_hybrid_kv_cache_manager "
        "enable_flashinfer_autotune use_fp64_gumbel allow_deprecated_quantization",
    ),
    # Requests.
    ("value", "20", "a request may ask for 20 log-probabilities a token", "max_logprobs"),
    (
        "value",
        "raw_logprobs",
        "log-probabilities are those before penalties and temperature",
        "logprobs_mode",
    ),
    ("list", "", _NO_PLUGINS, "logits_processors"),
    ("switch", OFF, "prompts are text or tokens", "enable_prompt_embeds"),
    ("value", ANY, "llguidance binds answers to grammars", "guided_decoding_backend"),
    ("value", "auto", _EACH_REQUEST, "structured_outputs_config"),
    ("value", "", _NO_PLUGINS, "logits_processor_pattern"),
    ("value", ANY, "the chat template tells how a model reasons", "reasoning_parser"),
    ("value", "", _NO_PLUGINS, "reasoning_parser_plugin tool_parser_plugin tool_server"),
    ("value", "", "reasoning is bounded as the answer is: leave it out", "reasoning_config"),
    ("switch", ANY, "reasoning is told apart from answers always", "enable_reasoning"),
    ("switch", ANY, "requests with tools may always have calls", "enable_auto_tool_choice"),
    (
        "switch",
        ANY,
        "with tool_choice none the model is told of no tools",
        "exclude_tools_when_tool_choice_none",
    ),
    (
        "value",
        "auto string",
        "templates get the parts of a message as one text",
        "chat_template_content_format",
    ),
    ("value", "", "send chat_template_kwargs with the requests", "default_chat_template_kwargs"),
    ("value", "assistant", "answers have that role", "response_role"),
    ("switch", OFF, "tokens are given as text and bytes", "return_tokens_as_token_ids"),
    ("switch", ANY, "usage always has them", "enable_prompt_tokens_details"),
    (
        "switch",
        OFF,
        "send stream_options.include_usage with the requests",
        "enable_force_include_usage",
    ),
    # Adapters, speculation, images.
    ("switch", OFF, _NO_ADAPTERS, "enable_lora enable_prompt_adapter"),
    ("list", "", _NO_ADAPTERS, "lora_modules prompt_adapters"),
    ("value", "", _NO_ADAPTERS, "default_mm_loras qlora_adapter_name_or_path"),
    (
        "value",
        ANY,
        _NEEDS_ADAPTERS,
        "max_loras max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size "
        "long_lora_scaling_factors max_prompt_adapters max_prompt_adapter_token",
    ),
    ("switch", ANY, _NEEDS_ADAPTERS, "fully_sharded_loras enable_lora_bias"),
    (
        "value",
        "",
        _NO_SPECULATION,
        "speculative_config speculative_model spec_method spec_model spec_tokens "
        "num_speculative_tokens",
    ),
    (
        "value",
        ANY,
        _NEEDS_SPECULATION,
        "ngram_prompt_lookup_max ngram_prompt_lookup_min speculative_max_model_len "
        "speculative_draft_tensor_parallel_size speculative_disable_by_batch_size "
        "spec_decoding_acceptance_method",
    ),
    (
        "value",
        ANY,
        _TEXT_ONLY,
        "limit_mm_per_prompt mm_processor_kwargs media_io_kwargs mm_processor_cache_gb "
        "mm_processor_cache_type mm_encoder_tp_mode video_pruning_rate",
    ),
    (
        "switch",
        ANY,
        _TEXT_ONLY,
        "language_model_only skip_mm_profiling disable_mm_preprocessor_cache "
        "interleave_mm_strings disable_chunked_mm_input",
    ),
    (
        "value",
        "",
        _TEXT_ONLY,
        "allowed_local_media_path pooler_config override_pooler_config io_processor_plugin",
    ),
    ("list", "", _TEXT_ONLY, "allowed_media_domains"),
    ("switch", OFF, _TEXT_ONLY, "enable_mm_embeds mm_encoder_only"),
    # Several devices.
    (
        "value",
        "1",
        _ONE_DEVICE,
        "data_parallel_size data_parallel_size_local nnodes api_server_count "
        "prefill_context_parallel_size decode_context_parallel_size",
    ),
    ("value", "0", _ONE_DEVICE, "data_parallel_rank data_parallel_start_rank node_rank"),
    ("value", "mp uni", _ONE_DEVICE, "distributed_executor_backend"),
    (
        "switch",
        OFF,
        _ONE_DEVICE,
        "worker_use_ray engine_use_ray headless enable_expert_parallel enable_eplb "
        "enable_dbo data_parallel_hybrid_lb data_parallel_external_lb",
    ),
    (
        "value",
        ANY,
        _NEEDS_DEVICES,
        "master_addr master_port data_parallel_address data_parallel_rpc_port "
        "data_parallel_backend distributed_timeout_seconds all2all_backend eplb_config "
        "expert_placement_strategy",
    ),
    ("switch", ANY, _NEEDS_DEVICES, "ray_workers_use_nsight"),
    ("list", "0", "--device says where to compute", "device_ids"),
    (
        "value",
        "",
        _NO_TRANSFER,
        "kv_transfer_config kv_events_config ec_transfer_config weight_transfer_config",
    ),
    (
        "value",
        "auto",
        _NO_PLUGINS,
        "worker_cls worker_extension_cls scheduler_cls additional_config",
    ),
    # Logs and metrics.
    (
        "switch",
        ANY,
        _NOTHING_LOGGED,
        "disable_log_requests disable_log_stats disable_uvicorn_access_log enable_log_deltas",
    ),
    ("value", ANY, _NOTHING_LOGGED, "max_log_len disable_access_log_for_endpoints"),
    ("value", ANY, "--log-level is of all lines", "uvicorn_log_level"),
    ("value", "", "--log-level says what is logged", "log_config_file logging_config"),
    (
        "switch",
        OFF,
        _NO_REQUEST_LOG,
        "enable_log_requests enable_log_outputs enable_per_request_metrics "
        "enable_server_load_tracking",
    ),
    (
        "value",
        "",
        _NO_TRACES,
        "otlp_traces_endpoint profiler_config show_hidden_metrics_for_version",
    ),
    ("list", "", _NO_TRACES, "collect_detailed_traces"),
    # The server.
    ("value", "", _NO_TLS, "ssl_keyfile ssl_certfile ssl_ca_certs ssl_ciphers"),
    ("value", "0", _NO_TLS, "ssl_cert_reqs"),
    ("switch", OFF, _NO_TLS, "enable_ssl_refresh"),
    ("value", "/", "let the proxy in front cut the path", "root_path"),
    ("value", "", "--host and --port say where to listen", "uds"),
    ("list", "", _NO_PLUGINS, "middleware"),
    ("switch", OFF, "keys come in headers, cookies aren't read", "allow_credentials"),
    (
        "value",
        '["*"] *',
        "--allowed-origins says which web pages may use the API",
        "allowed_methods allowed_headers",
    ),
    (
        "switch",
        OFF,
        "send request_id in the body: it becomes part of the answer's id",
        "enable_request_id_headers",
    ),
    ("switch", ANY, "there are no such pages", "disable_fastapi_docs enable_offline_docs"),
    (
        "value",
        ANY,
        "--max-body-bytes bounds requests",
        "h11_max_incomplete_event_size h11_max_header_count",
    ),
    (
        "switch",
        OFF,
        "there is no such endpoint: leave it out",
        "enable_tokenizer_info_endpoint tokens_only",
    ),
)

OPTIONS: Mapping[str, Option] = {
    name: Option(kind, tuple(neutral.split()), advice)
    for kind, neutral, advice, names in _ROWS
    for name in names.split()
}
