"""The line that says what KV memory holds."""

from __future__ import annotations

import msgspec
from fakes import FakeRunner

from streamkv.config import EngineConfig
from streamkv.engine.ready_log import kv_memory_line

INFO = msgspec.structs.replace(
    FakeRunner().info, num_blocks=4096, block_size=16, max_model_len=8192, block_bytes=1 << 20
)


def test_all_tiers_are_named_with_what_they_hold():
    assert kv_memory_line(EngineConfig(), INFO, has_store=False) == (
        "KV memory: 4,096 blocks of 16 (4.0 GiB) for 65,536 tokens, 8.0 sequences of 8,192"
    )
    info = msgspec.structs.replace(INFO, num_host_slots=512, block_size=8)
    config = EngineConfig(kv_cache_dir="/prefixes", kv_cache_disk=2.5)
    assert kv_memory_line(config, info, has_store=True) == (
        "KV memory: 4,096 blocks of 8 (4.0 GiB) for 32,768 tokens, 4.0 sequences of 8,192; "
        "512 more in host memory (512 MiB); up to 2.5 GiB of prefixes in /prefixes"
    )


def test_bytes_that_are_not_known_are_left_out():
    info = msgspec.structs.replace(INFO, block_bytes=0, num_host_slots=3)
    line = kv_memory_line(EngineConfig(), info, has_store=False)
    assert line.endswith("for 65,536 tokens, 8.0 sequences of 8,192; 3 more in host memory")


def test_what_keeps_it_small_is_told_and_small_numbers_have_small_units():
    bound = "the context is cut from 8,192 to 16: more by --num-gpu-blocks-override"
    sizes = {"num_blocks": 1, "max_model_len": 16, "block_bytes": 23040, "kv_bound": bound}
    config = EngineConfig(kv_cache_dir="/prefixes", kv_cache_disk=0.03)
    line = kv_memory_line(config, msgspec.structs.replace(INFO, **sizes), has_store=True)
    assert line == (
        "KV memory: 1 block of 16 (22.5 KiB) for 16 tokens, 1.0 sequences of 16; the context is "
        "cut from 8,192 to 16: more by --num-gpu-blocks-override; up to 30.7 MiB of prefixes in "
        "/prefixes"
    )
