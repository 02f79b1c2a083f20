"""Scripts written for vLLM start, or are told by name what can't be had."""

import json
import re
import signal
import subprocess
import sys

import httpx
import pytest
from tiny import save_tiny_checkpoint

from streamkv import LLM
from streamkv.cli import main
from streamkv.config import EngineConfig, ServerConfig
from streamkv.errors import ConfigError
from streamkv.vllm_options import OPTIONS, check, flag_of


def test_no_option_is_known_twice():
    assert not OPTIONS.keys() & {*EngineConfig.__struct_fields__, *ServerConfig.__struct_fields__}


def neutral_flags(name: str) -> list[str]:
    option = OPTIONS[name]
    value = "none" if option.takes_any or not option.neutral else option.neutral[0]
    if option.kind == "switch":
        return [f"--no-{flag_of(name)[2:]}" if value == "false" else flag_of(name)]
    return [flag_of(name), value]


def test_what_changes_nothing_is_taken_by_its_flag(served):
    every = [word for name in OPTIONS for word in neutral_flags(name)]
    assert main(["serve", "m", *every]) == 0
    assert main(["serve", *every, "--port", "0", "m"]) == 0
    for name in ("enable_chunked_prefill", "load_format", "ignore_patterns"):  # one of a kind
        assert main(["serve", *neutral_flags(name), "m"]) == 0
    assert [engine.model for engine, _ in served] == ["m"] * 5


@pytest.mark.parametrize(
    "given",
    [
        {"enable_chunked_prefill": True, "max_logprobs": 20, "cpu_offload_gb": 0.0},
        {"speculative_config": None, "hf_overrides": {}, "logits_processors": []},
        {"distributed_executor_backend": "mp", "data_parallel_size": 1, "hf_token": True},
        {"compilation_config": {"level": 3}, "max_seq_len_to_capture": 8192},
        {"limit_mm_per_prompt": {"image": 2}, "disable_log_stats": True, "enable_lora": False},
    ],
)
def test_what_changes_nothing_is_taken_in_python(given):
    check(given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"enable_lora": True}, "enable_lora (--enable-lora): expected false or 0, got true; "),
        ({"load_format": "dummy"}, "expected auto or hf or safetensors or gguf, got dummy; "),
        ({"enable_chunked_prefill": False}, "raise it to have them whole"),
        ({"speculative_config": {"model": "x"}}, "speculative_config (--speculative-config): "),
        ({"cpu_offload_gb": 4}, "cpu_offload_gb (--cpu-offload-gb): expected 0, got 4; "),
        ({"port": 8000}, "port (--port) is an option of `streamkv serve`: leave it out here"),
        ({"max_num_seq": 4}, "got max_num_seq: did you mean max_num_seqs?"),
        ({"entirely_new": 4}, "expected an option of streamkv or of vLLM, got entirely_new"),
    ],
)
def test_what_would_change_something_is_refused_by_name(given, message):
    with pytest.raises(ConfigError) as raised:
        check(given)
    assert message in str(raised.value)


def test_a_token_is_refused_without_being_shown(capsys):
    assert main(["serve", "--hf-token", "hf_secret"]) == 2
    error = capsys.readouterr().err
    assert "HF_TOKEN" in error and "secret" not in error


def test_names_of_vllm_that_mean_the_same_are_taken(served, tmp_path, monkeypatch):
    monkeypatch.delenv("STREAMKV_CONFIG", raising=False)
    (tmp_path / "x.toml").write_text('kv_offloading_size = 2.5\nkv-cache-memory-bytes = "1G"\n')
    flags = ["--kv-offloading-size", "4", "--kv-offloading-backend", "native"]
    assert main(["serve", "m", *flags, "--preemption-mode", "swap"]) == 0
    assert main(["serve", "m", "--config", str(tmp_path / "x.toml")]) == 0
    (first, _), (second, _) = served
    assert (first.swap_space, first.preemption_mode) == (4.0, "swap")
    assert (second.swap_space, second.kv_cache_memory_bytes) == (2.5, 1 << 30)
    with pytest.raises(ConfigError, match="swap_space.*: expected a number >= 0"):
        LLM("m", kv_offloading_size=-1)
    assert main(["serve", "m", "--config", str(tmp_path / "x.toml"), "--swap-space", "0"]) == 0
    assert served[-1][0].swap_space == 0


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--enable-auto-tool-choice", "--tool-call-parser", "kimi"], "--tool-call-parser"),
        (["--enable_lora", "--lora-modules", "a=b", "c=d"], "--enable-lora"),
        (["-dp", "2"], "--data-parallel-size"),
        (["--no-enable-chunked-prefill"], "--enable-chunked-prefill"),
        (["--enable-chunked-prefill", "False"], "--enable-chunked-prefill"),
        (["--ssl-keyfile", "k.pem"], "--ssl-keyfile"),
        (["--quantization", "awq"], "--quantization"),
    ],
)
def test_flags_that_ask_for_more_are_one_line(flags, named, served, capsys):
    assert main(["serve", "m", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert named in line and served == []


COMMAND = (
    "--host 0.0.0.0 --port 0 --max-num-seqs 256 --swap-space 0.25 --max-model-len 128 "
    "--gpu-memory-utilization 0.95 --dtype auto --enforce-eager --enable-prefix-caching "
    "--block-size 32 --served-model-name n --api-key k --enable-chunked-prefill "
    "--disable-log-requests -tp 1"
).split()


@pytest.mark.parametrize(
    "command", [["streamkv", "serve"], ["streamkv.entrypoints.openai.api_server"]]
)
def test_a_server_starts_as_vllm_is_started(command, tmp_path):
    folder = save_tiny_checkpoint(tmp_path, head_dim=16)
    server = subprocess.Popen(
        [sys.executable, "-m", *command, "--model", str(folder), *COMMAND],
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        try:
            assert server.stderr is not None
            log = ""
            while "KV memory: " not in log:
                assert (line := server.stderr.readline()), log
                log += line
            assert " is ready on " in log and "more in host memory (256 MiB)" in log
            url = re.search(r"http://0\.0\.0\.0(:\d+)", log)
            assert url is not None, log
            answer = httpx.post(
                f"http://127.0.0.1{url[1]}/v1/completions",
                json={"model": "n", "prompt": "the quick", "max_tokens": 4},
                headers={"Authorization": "Bearer k"},
            )
            assert answer.status_code == 200, answer.text
            assert json.loads(answer.text)["model"] == "n"
        finally:
            server.terminate()
            server.communicate(timeout=30)
    assert server.returncode == -signal.SIGTERM
