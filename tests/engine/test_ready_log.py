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
        "KV memory: 4,096 blocks of 16 (4.0 GiB) hold 65,536 tokens, 8.0 sequences of 8,192"
    )
    info = msgspec.structs.replace(INFO, num_host_slots=512, block_size=8)
    config = EngineConfig(kv_cache_dir="/prefixes", kv_cache_disk=2.5)
    assert kv_memory_line(config, info, has_store=True) == (
        "KV memory: 4,096 blocks of 8 (4.0 GiB) hold 32,768 tokens, 4.0 sequences of 8,192; "
        "512 more in host memory (512 MiB); up to 2.5 GiB of prefixes in /prefixes"
    )


def test_bytes_that_are_not_known_are_left_out():
    info = msgspec.structs.replace(INFO, block_bytes=0, num_host_slots=3)
    line = kv_memory_line(EngineConfig(), info, has_store=False)
    assert line.endswith("hold 65,536 tokens, 8.0 sequences of 8,192; 3 more in host memory")
