"""The memory plan, the shared budget, and how available memory is measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.models import ModelConfig, read_config
from streamkv.runner.kv_cache import (
    MemoryBudget,
    MemoryShare,
    available_memory_bytes,
)
from streamkv.runner.kv_plan import (
    flags_to_lower,
    plan_host_slots,
    plan_kv_cache,
    plan_memory,
)

GIB = 1 << 30
MIB = 1 << 20
MODEL = read_config(
    {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": 4096,
    }
)


def plan(**changes):
    """1000 bytes a token, blocks of 16: 16,000 bytes a block."""
    numbers = {
        "free_bytes": 16_000 * 100,
        "limit_bytes": None,
        "held_back_bytes": 16_000,
        "block_size": 16,
        "max_num_seqs": 8,
        "max_model_len": 0,
        "max_context_len": 4096,
        "num_blocks_override": 0,
    }
    numbers |= changes
    block_bytes = numbers.pop("kv_bytes_per_token", 1000) * numbers["block_size"]
    return plan_kv_cache(block_bytes=block_bytes, **numbers)


def test_the_pool_is_what_memory_allows_and_shortens_the_context_to_it():
    found = plan()
    assert (found.num_blocks, found.max_model_len) == (100, 1600)
    assert found.num_bytes == 16_000 * 100


def test_the_pool_is_never_larger_than_all_sequences_need():
    assert plan(free_bytes=GIB, max_num_seqs=2, max_model_len=100).num_blocks == 2 * 7
    assert plan(free_bytes=GIB, max_model_len=4096).max_model_len == 4096


def test_the_limit_caps_the_pool_but_gives_way_to_one_sequence_that_was_asked_for():
    assert plan(limit_bytes=16_000 * 40).num_blocks == 40
    assert plan(limit_bytes=16_000 * 40, max_model_len=1600).num_blocks == 100
    assert plan(limit_bytes=16_000 * 40, max_model_len=320).num_blocks == 40


def test_a_context_that_was_asked_for_and_does_not_fit_is_refused_with_numbers():
    with pytest.raises(ConfigError, match="2000 needs 125 KV blocks .* there are 100") as caught:
        plan(max_model_len=2000)
    assert caught.value.message.endswith("--max-model-len to 1600, or get more by freeing memory")
    with pytest.raises(ConfigError, match="more by --gpu-memory-utilization or freeing memory$"):
        plan(max_model_len=1616)
    with pytest.raises(ConfigError, match="at most 4096, the positions"):
        plan(max_model_len=5000, free_bytes=GIB)


def test_an_override_wins_over_memory_and_there_is_always_a_block():
    assert plan(num_blocks_override=7, free_bytes=0).num_blocks == 7
    assert plan(num_blocks_override=7).max_model_len == 112
    assert plan(num_blocks_override=10_000).num_blocks == 10_000
    assert plan(free_bytes=0).num_blocks == 1
    with pytest.raises(ConfigError, match="there are 7"):
        plan(num_blocks_override=7, max_model_len=113)


def test_bytes_that_were_told_are_taken_to_the_last_block(caplog):
    found = plan(kv_memory_bytes=16_000 * 9 + 15_999, free_bytes=0, max_num_seqs=1)
    assert (found.num_blocks, found.max_model_len) == (9, 144)
    assert plan(kv_memory_bytes=16_000 * 9, num_blocks_override=7).num_blocks == 7
    assert plan(kv_memory_bytes=1 << 33, limit_bytes=16_000).num_blocks == (1 << 33) // 16_000
    with pytest.raises(ConfigError, match="2000 needs 125 KV blocks .* there are 9 .*--max-model"):
        plan(kv_memory_bytes=16_000 * 9, max_model_len=2000)
    expected = r"--kv-cache-memory-bytes.: .*1 to 1048576 KV blocks .*15.6 KiB each, got 15999 "
    with pytest.raises(ConfigError, match=expected):
        plan(kv_memory_bytes=15_999)
    with pytest.raises(ConfigError, match="got 16777232000 bytes for 1048577"):
        plan(kv_memory_bytes=16_000 * ((1 << 20) + 1))


def slots(free_bytes: int = GIB, block_bytes: int = 16_000, **config) -> int:
    fields = {"swap_space": 0.0} | config
    return plan_host_slots(EngineConfig(**fields), block_bytes=block_bytes, free_bytes=free_bytes)


def test_host_slots_are_what_was_asked_for_and_enough_for_the_way_to_the_disk():
    assert slots() == 0
    assert slots(swap_space=0.5) == (GIB // 2) // 16_000
    assert slots(swap_space=100.0, free_bytes=1 << 50) == 1 << 20, "as many as there can be"
    assert slots(kv_cache_dir="kv") == 64
    assert slots(kv_cache_dir="kv", swap_space=0.0005) == 64
    assert slots(kv_cache_dir="kv", swap_space=0.5) == (GIB // 2) // 16_000
    assert slots(kv_cache_dir="kv", block_bytes=10 << 20) == 25, "256 MiB"
    assert slots(kv_cache_dir="kv", block_bytes=400 << 20) == 1


def test_host_slots_that_do_not_fit_are_refused_with_numbers():
    with pytest.raises(
        ConfigError, match=r"--swap-space.: 134,217 KV blocks .* take 2.0 GiB, 1.0 G"
    ):
        slots(swap_space=2.0)
    with pytest.raises(ConfigError, match=r"--kv-cache-dir.: 64 KV .* take 1,000 KiB, 0 bytes are"):
        slots(kv_cache_dir="kv", free_bytes=0)
    with pytest.raises(ConfigError, match=r"--swap-space.: .* for at least one .* 15.6 KiB, got"):
        slots(swap_space=0.00001)
    with pytest.raises(ConfigError) as caught:
        slots(swap_space=1_000_000.0)
    assert caught.value.message == (
        "swap_space (--swap-space): 1,048,576 KV blocks in host memory, the most there can be, "
        "take 15.6 GiB, 1.0 GiB are free: lower --swap-space (1000000 GiB)"
    )


def whole_plan(
    model: ModelConfig,
    host_free_bytes: int | None = None,
    free_bytes: int = 40 * MIB,
    held_back_bytes: int = GIB,
    **config,
):
    return plan_memory(
        EngineConfig(max_num_seqs=2, max_num_batched_tokens=16, **config),
        model,
        block_bytes=MIB,
        free_bytes=free_bytes,
        limit_bytes=None,
        held_back_bytes=held_back_bytes,
        host_free_bytes=host_free_bytes,
    )


def test_host_slots_come_out_of_the_same_memory_unless_the_device_has_its_own():
    assert whole_plan(MODEL).num_host_slots == 0
    num_blocks = whole_plan(MODEL).num_blocks
    swap = {"swap_space": 10 / 1024}
    found = whole_plan(MODEL, **swap)
    assert (found.num_host_slots, found.num_blocks) == (10, num_blocks - 10)
    assert found.host_bytes == 10 * MIB
    assert found.bound.startswith("all that is free beside --swap-space, the context is cut ")
    assert whole_plan(MODEL, kv_cache_dir="kv", free_bytes=80 * MIB).bound.startswith(
        "all that is free, the context is cut "
    )
    found = whole_plan(MODEL, host_free_bytes=10 * MIB, **swap)
    assert (found.num_host_slots, found.num_blocks) == (10, num_blocks)
    with pytest.raises(ConfigError, match="take 10.0 MiB, 9.0 MiB are free"):
        whole_plan(MODEL, host_free_bytes=9 * MIB, **swap)
    told = {"kv_cache_memory_bytes": 32 * MIB}
    assert whole_plan(MODEL, **told).num_blocks == 32
    with pytest.raises(ConfigError, match="take 10.0 MiB, .* MiB are free.*bytes .32.0 MiB"):
        whole_plan(MODEL, **told, **swap)


def test_more_kv_memory_than_is_free_is_refused_with_numbers_but_an_override_is_not():
    told = {"kv_cache_memory_bytes": GIB}
    expected = (
        r"--kv-cache-memory-bytes.: KV blocks are to take 1.0 GiB, 39.9 MiB are free within "
        r"--gpu-memory-utilization .0.9.: raise that, or lower --kv-cache-memory-bytes .1.0 GiB."
    )
    with pytest.raises(ConfigError, match=expected):
        whole_plan(MODEL, **told)
    with pytest.raises(ConfigError, match="39.9 MiB are free: lower --kv-cache-memory-bytes"):
        whole_plan(MODEL, held_back_bytes=0, **told, gpu_memory_utilization=1.0)
    with pytest.raises(ConfigError, match=r"free within --gpu.* .0.9.: lower --kv-cache-memory-b"):
        whole_plan(MODEL, held_back_bytes=900 * MIB, **told)
    assert whole_plan(MODEL, num_gpu_blocks_override=1024).num_blocks == 1024
    assert whole_plan(MODEL, num_gpu_blocks_override=1024, **told).num_blocks == 1024


def test_a_step_that_does_not_fit_is_refused_with_the_flags_that_help():
    def refused(held_back_bytes: int = GIB, **config) -> str:
        with pytest.raises(ConfigError, match="the largest step needs") as caught:
            whole_plan(MODEL, free_bytes=1000, held_back_bytes=held_back_bytes, **config)
        return caught.value.message.partition("KV cache, ")[2]

    lower = "lower --max-num-batched-tokens (16) or --max-num-seqs (2)"
    assert refused(gpu_memory_utilization=0.01) == (
        f"1,000 bytes are free within --gpu-memory-utilization (0.01): raise that, or {lower}"
    )
    assert refused(0, gpu_memory_utilization=1.0) == f"1,000 bytes are free: {lower}"
    within = "1,000 bytes are free within --gpu-memory-utilization (0.9): "
    assert refused(1000) == f"{within}{lower}", "raising it would not do"
    assert whole_plan(MODEL, free_bytes=1000, num_gpu_blocks_override=3).num_blocks == 3


def test_only_flags_that_were_given_are_to_be_lowered():
    assert flags_to_lower(EngineConfig()) == "--gpu-memory-utilization (0.9)"
    config = EngineConfig(num_gpu_blocks_override=7, swap_space=0.5, kv_cache_dir="kv")
    assert flags_to_lower(config) == "--num-gpu-blocks-override (7) or --swap-space (0.5 GiB)"
    config = EngineConfig(kv_cache_memory_bytes="100G", swap_space=1e6)
    assert flags_to_lower(config) == (
        "--kv-cache-memory-bytes (100 GiB) or --swap-space (1000000 GiB)"
    )

    def remedies(host_free_bytes: int | None = None, **config) -> str:
        with pytest.raises(ConfigError, match="in host memory take") as caught:
            whole_plan(MODEL, host_free_bytes, **config)
        return caught.value.message.partition("free")[2]

    within = " within --gpu-memory-utilization (0.9): raise that, or "
    lower = "lower --swap-space (1 GiB)"
    assert remedies(swap_space=1.0) == f"{within}{lower}"
    assert remedies(swap_space=1.0, kv_cache_dir="kv") == f"{within}{lower}"
    cannot = " within --gpu-memory-utilization (0.9): "
    assert remedies(swap_space=1.5) == f"{cannot}lower --swap-space (1.5 GiB)"
    assert remedies(kv_cache_dir="kv") == f"{within}leave out --kv-cache-dir"
    told = {"kv_cache_memory_bytes": 32 * MIB}
    also = "lower --kv-cache-memory-bytes (32.0 MiB)"
    assert remedies(swap_space=1.0, **told) == f"{within}{lower}", "less of the other would not do"
    small = {"swap_space": 20 / 1024} | told
    assert remedies(**small) == f"{within}lower --swap-space (0.01953125 GiB) or {also}"
    assert remedies(MIB, swap_space=1.0, **told) == f": {lower}"


def test_the_plan_says_what_keeps_it_small_and_what_gives_more():
    free, cut = "all that is free", "the context is cut from 4,096 to"
    for changes, bound in (
        ({}, f"{free}, {cut} 1,600: more by --gpu-memory-utilization or freeing memory"),
        ({"held_back_bytes": 0}, f"{free}, {cut} 1,600: more by freeing memory"),
        (
            {"free_bytes": 16_000 * 256},
            f"{free}: more by --gpu-memory-utilization or freeing memory",
        ),
        ({"free_bytes": GIB}, "enough for 8 sequences: more by --max-num-seqs"),
        ({"free_bytes": GIB, "max_num_seqs": 1}, "enough for 1 sequence: more by --max-num-seqs"),
        ({"num_blocks_override": 7}, f"{cut} 112: more by --num-gpu-blocks-override"),
        ({"kv_memory_bytes": 16_000 * 9}, f"{cut} 144: more by --kv-cache-memory-bytes"),
        ({"num_blocks_override": 256}, ""),
        (
            {"free_bytes": GIB, "limit_bytes": GIB - 1},
            "enough for 8 sequences: more by --max-num-seqs",
        ),
        (
            {"free_bytes": GIB, "limit_bytes": 16 * MIB},
            "at most 16.0 MiB on a CPU: more by --kv-cache-memory-bytes",
        ),
        (
            {"free_bytes": GIB, "limit_bytes": MIB},
            f"at most 1.0 MiB on a CPU, {cut} 1,040: more by --kv-cache-memory-bytes",
        ),
        (
            {"max_model_len": 800},
            f"{free}: more by --gpu-memory-utilization or freeing memory",
        ),
        (
            {"free_bytes": 1 << 50, "block_size": 1, "max_context_len": 2**24},
            "the most blocks there can be, the context is cut from 16,777,216 to 1,048,576: more "
            "by a larger --block-size",
        ),
    ):
        found = plan(**changes)
        assert found.bound == bound
        assert found.full_model_len == changes.get(
            "max_model_len", changes.get("max_context_len", 4096)
        )


@pytest.mark.parametrize("num_blocks", [2**20 + 1, 2**26, 10**20])
def test_more_blocks_than_the_books_can_hold_are_refused(num_blocks):
    with pytest.raises(ConfigError, match="--num-gpu-blocks-override.: expected at most 1048576"):
        plan(num_blocks_override=num_blocks)
    assert plan(num_blocks_override=2**20).num_blocks == 2**20


def test_a_context_with_more_blocks_than_the_books_can_hold_is_refused():
    sizes = {"kv_bytes_per_token": 1, "block_size": 1, "free_bytes": 1 << 50}
    with pytest.raises(ConfigError, match="2000000 KV blocks .* raise --block-size"):
        plan(max_model_len=2_000_000, max_context_len=2**24, **sizes)


def test_a_plan_never_has_more_blocks_than_the_books_can_hold():
    sizes = {"kv_bytes_per_token": 1, "max_num_seqs": 4096, "max_context_len": 2**24}
    assert plan(free_bytes=1 << 50, **sizes).num_blocks == 2**20
    assert plan(free_bytes=1 << 50, block_size=1, **sizes).num_blocks == 2**20


def test_a_context_without_room_for_an_answer_is_refused():
    with pytest.raises(ConfigError, match="--max-model-len.: expected at least 2"):
        plan(max_model_len=1)
    with pytest.raises(ConfigError, match=r"1 KV block of 1 token: 500 bytes are free"):
        plan(block_size=1, free_bytes=500)
    assert plan(block_size=1, free_bytes=2000).max_model_len == 2


def test_a_budget_is_shared_by_name():
    budget = MemoryBudget(1000)
    budget.reserve("a weights", 600)
    with pytest.raises(
        ConfigError, match="b weights: 500 bytes needed, 400 bytes of 1,000 bytes free"
    ):
        budget.reserve("b weights", 500)
    with pytest.raises(ConfigError, match="a weights is reserved already"):
        budget.reserve("a weights", 1)
    with pytest.raises(ConfigError, match="use a smaller model or dtype$"):
        budget.reserve("b weights", 500)
    assert budget.free_bytes == 400
    budget.reserve("a KV cache", 5000, overcommit=True)
    assert budget.free_bytes == 0
    budget.release("a KV cache")
    budget.release("a weights")
    budget.release("never reserved")
    budget.reserve("b weights", 500)
    assert budget.free_bytes == 500


def test_a_share_is_of_the_budget_it_was_given_or_of_what_is_available():
    config = EngineConfig(model="m", gpu_memory_utilization=0.5)
    own = MemoryShare(config, None)
    assert own.held_back_bytes == 0
    own.measure(lambda: 2000)
    own.reserve("weights", 600)
    assert (own.free_bytes, own.held_back_bytes) == (400, 1000)
    with pytest.raises(ConfigError, match="or dtype, or raise --gpu-memory-utilization$"):
        own.reserve("KV cache", 1400)
    with pytest.raises(ConfigError, match="use a smaller model or dtype$"):
        own.reserve("KV cache", 1401)
    budget = MemoryBudget(1000)
    given = MemoryShare(config, budget)
    given.measure(lambda: 10**9)
    given.reserve("weights", 600)
    with pytest.raises(ConfigError, match="m KV cache: 500 bytes needed"):
        given.reserve("KV cache", 500)
    assert given.free_bytes == budget.free_bytes == 400
    assert given.held_back_bytes == 0
    for _ in range(2):
        given.release()
        assert budget.free_bytes == 1000


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def measure(root: Path) -> int:
    return available_memory_bytes(proc=root / "proc", cgroups=root / "cgroup")


def test_available_memory_respects_every_cgroup_above_us(tmp_path):
    write(tmp_path / "proc", meminfo="MemTotal: 9 kB\nMemAvailable: 8388608 kB\n")
    assert measure(tmp_path) == 8 * GIB
    write(tmp_path / "proc" / "self", cgroup="0::/outer/inner\n")
    assert measure(tmp_path) == 8 * GIB, "a cgroup without files has no limit"
    inner = tmp_path / "cgroup" / "outer" / "inner"
    write(inner, memory__max="max\n", memory__current=f"{GIB}\n", memory__stat="")
    assert measure(tmp_path) == 8 * GIB
    write(
        inner.parent,
        memory__max=f"{4 * GIB}\n",
        memory__current=f"{3 * GIB}\n",
        memory__stat=f"anon 5\ninactive_file {GIB}\n",
    )
    assert measure(tmp_path) == 2 * GIB, "file pages that can be dropped are available"
    write(inner, memory__max=f"{GIB}\n", memory__current=f"{2 * GIB}\n", memory__stat="")
    assert measure(tmp_path) == 0


def test_available_memory_reads_version_1_and_a_path_seen_from_outside(tmp_path):
    write(tmp_path / "proc", meminfo="MemAvailable: 8388608 kB\n")
    write(tmp_path / "proc" / "self", cgroup="4:cpu,cpuacct:/x\n3:memory:/docker/abc\n0::/\n")
    write(
        tmp_path / "cgroup" / "memory",
        memory__limit_in_bytes=f"{2 * GIB}\n",
        memory__usage_in_bytes=f"{GIB}\n",
        memory__stat=f"total_inactive_file {GIB // 2}\n",
    )
    assert measure(tmp_path) == 3 * GIB // 2


def test_this_machine_has_memory():
    assert 0 < available_memory_bytes() < 1 << 50
