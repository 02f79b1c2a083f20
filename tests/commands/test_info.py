"""`streamkv info`: what it says of a checkpoint besides its weights."""

from __future__ import annotations

import json
import shutil

import torch
from tiny import save_tiny_checkpoint, tiny_tokenizer

from streamkv import info
from streamkv.cli import main
from streamkv.runner import select


def said_of(capsys, *arguments) -> dict[str, str]:
    assert main(["info", *map(str, arguments)]) == 0
    return {line[:16].strip(): line[17:] for line in capsys.readouterr().out.splitlines()}


def test_it_says_what_texts_are_made_of(checkpoint, tmp_path, capsys):
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    said = said_of(capsys, folder)
    assert said["architecture"] == "LlamaForCausalLM"
    assert said["tokenizer"] == f"byte-level BPE, {tiny_tokenizer().vocab_size} tokens"
    assert said["chat template"] == "yes"
    assert said["end tokens"] == "<|endoftext|> (0), <|im_end|> (2)"
    assert said["sampling"] == "the API's defaults"
    defaults = {"temperature": 0.6, "top_k": None, "max_new_tokens": 32}
    (folder / "generation_config.json").write_text(json.dumps(defaults))
    (folder / "tokenizer_config.json").write_text("{}")
    said = said_of(capsys, folder)
    assert said["sampling"] == "temperature 0.6, max_tokens 32"
    assert said["end tokens"] == "<|im_end|> (2)"
    assert said["chat template"].startswith("none")
    assert said_of(capsys, folder, "--generation-config", "vllm")["sampling"].startswith("the API")


def test_it_says_that_a_folder_without_a_tokenizer_can_not_be_served(checkpoint, tmp_path, capsys):
    shutil.copytree(checkpoint, tmp_path, dirs_exist_ok=True)
    (tmp_path / "tokenizer.json").unlink()
    said = said_of(capsys, tmp_path)
    assert said["tokenizer"].startswith(f"serve would refuse the model: {tmp_path}")
    assert "weights" in said
    assert "chat template" not in said


def test_it_says_that_the_kernels_have_no_such_heads(tmp_path, capsys):
    save_tiny_checkpoint(tmp_path, head_dim=24)
    said = said_of(capsys, tmp_path)
    assert said["kernels"].startswith("serve would refuse the model: ")
    assert "a multiple of 16 up to 256, got 24; use --ops reference" in said["kernels"]
    assert "kernels" not in said_of(capsys, tmp_path, "--ops", "reference")
    assert main(["generate", "the", "--model", str(tmp_path)]) == 1
    assert f"{tmp_path}: the native kernels can't run this model" in capsys.readouterr().err


def test_where_auto_finds_a_gpu_it_says_nothing_of_kernels(tmp_path, capsys, monkeypatch):
    save_tiny_checkpoint(tmp_path / "model", head_dim=24)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(select, "CUDA_DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "kernels" not in said_of(capsys, tmp_path / "model")
    assert "kernels" in said_of(capsys, tmp_path / "model", "--device", "cpu")


def test_it_says_that_the_context_ends_where_a_window_would_begin(tmp_path, capsys):
    save_tiny_checkpoint(
        tmp_path, architecture="MistralForCausalLM", hidden_size=64, sliding_window=64
    )
    said = said_of(capsys, tmp_path)
    assert said["context"].startswith("64 tokens of the checkpoint's 256; ")
    assert "64 that its layers attend to" in said["context"]
    said = said_of(capsys, tmp_path, "--max-model-len", "32")
    assert said["context"].startswith("32 tokens of the checkpoint's 256")


def test_it_says_where_keys_and_values_would_be(checkpoint, capsys, monkeypatch):
    said = said_of(capsys, checkpoint, "--kv-cache-memory-bytes", "40K", "--dtype", "float32")
    assert said["KV blocks"].startswith("5 of 16 tokens (40.0 KiB): 80 tokens, 1.0 sequences of 80")
    assert said["KV blocks"].endswith("to 80: more by --kv-cache-memory-bytes")
    assert said["context"].startswith("80 tokens of the checkpoint's")
    assert said["KV host slots"] == "none: see --swap-space"
    assert said["KV on disk"] == "none: see --kv-cache-dir"
    said = said_of(capsys, checkpoint, "--kv-cache-dir", "kept", "--kv-cache-disk", "1.5")
    assert said["KV host slots"].startswith("64 blocks (")
    assert said["KV on disk"] == "up to 1.5 GiB in kept"
    monkeypatch.setattr(info, "available_memory_bytes", lambda: 1 << 30)
    said = said_of(capsys, checkpoint, "--kv-cache-memory-bytes", "2G")
    assert said["KV blocks"].startswith("serve would refuse: kv_cache_memory_bytes (--kv-cache-")
    said = said_of(capsys, checkpoint, "--swap-space", "1000000")
    assert said["KV blocks"].startswith("serve would refuse: swap_space (--swap-space): ")
