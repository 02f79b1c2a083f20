"""A TOML file sets what flags set; what is wrong with it is one line that names file and key."""

import pytest

from streamkv.cli import main
from streamkv.config import EngineConfig, ServerConfig


@pytest.fixture
def serve(served, tmp_path):
    """What `streamkv serve --config FILE` would serve, FILE having this content."""

    def ask(content: str, *arguments: str) -> tuple[EngineConfig, ServerConfig]:
        path = tmp_path / "x.toml"
        path.write_text(content)
        assert main(["serve", "--config", str(path), *arguments]) == 0
        return served.pop()

    return ask


def test_keys_are_the_names_of_flags(serve):
    engine_config, server_config = serve(
        """
        model = "m"
        max-num-seqs = 8
        max_model_len = "2K"
        gpu-memory-utilization = 1
        enable-prefix-caching = false
        served-model-name = ["a", "b"]
        port = 9000
        api-key = "secret"
        load-format = "auto"
        """
    )
    assert engine_config == EngineConfig(
        model="m",
        max_num_seqs=8,
        max_model_len=2048,
        gpu_memory_utilization=1.0,
        enable_prefix_caching=False,
        served_model_name=("a", "b"),
    )
    assert server_config == ServerConfig(port=9000, api_key=("secret",))


def test_the_mark_that_some_editors_put_first_is_no_error(serve):
    assert serve("\ufeffport = 9000")[1].port == 9000


def test_a_flag_beats_a_variable_which_beats_the_file_which_beats_the_default(serve, monkeypatch):
    content = "block-size = 4\nmax-num-seqs = 4\nthreads = 4"
    monkeypatch.setenv("STREAMKV_BLOCK_SIZE", "5")
    monkeypatch.setenv("STREAMKV_MAX_NUM_SEQS", "5")
    config, _ = serve(content, "--block-size", "6")
    assert (config.block_size, config.max_num_seqs, config.threads) == (6, 5, 4)
    assert config.max_num_batched_tokens == EngineConfig().max_num_batched_tokens


def test_a_variable_names_the_file_and_other_commands_read_their_part_of_it(monkeypatch, tmp_path):
    path = tmp_path / "x.toml"
    path.write_text('model = "m"\nport = 9000\nmax-num-seqs = 8')
    monkeypatch.setenv("STREAMKV_CONFIG", str(path))
    seen: list[EngineConfig] = []
    monkeypatch.setattr(
        "streamkv.bench.throughput.bench_throughput",
        lambda engine_config, options: seen.append(engine_config) or 0,
    )
    assert main(["bench", "throughput", "--concurrency", "1"]) == 0
    assert main(["bench", "throughput", "another"]) == 0
    assert [config.model for config in seen] == ["m", "another"]
    assert {config.max_num_seqs for config in seen} == {8}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'port = "9000"', "x.toml: port: expected a whole number >= 0 and <= 65535, got"),
        (b"max-num-seqs = 0", "x.toml: max-num-seqs: expected a whole number >= 1 and"),
        (b"enforce-eager = 1", "x.toml: enforce-eager: expected true or false, got 1"),
        (b"api-key = [1]", "x.toml: api-key: expected text, got 1"),
        (b"max-num-seq = 8", "got max-num-seq: did you mean max-num-seqs?"),
        (b"[serve]\nport = 1", "x.toml: expected keys in no section, got [serve]"),
        (b'api-key = ""', "x.toml: --api-key"),
        (b"tensor-parallel-size = 2", "x.toml: tensor_parallel_size (--tensor-parallel-size)"),
        (b"#" * (1 << 20) + b"\n", "x.toml: expected a TOML file of at most 1 MiB"),
        (b"max-num-seqs = 8\nmax_num_seqs = 9", "x.toml: max_num_seqs is set twice"),
        (b"enable-lora = true", "x.toml: enable_lora (--enable-lora): expected false"),
        (b"port: 9000", "x.toml: expected TOML, lines like max-num-seqs = 8"),
        (b"model = '\xff'", "x.toml: expected TOML, lines like max-num-seqs = 8: not UTF-8"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_file_and_key(content, message, tmp_path, capsys):
    path = tmp_path / "x.toml"
    path.write_bytes(content)
    assert main(["serve", "--config", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and "x.toml" in line


def test_a_file_that_is_not_there_is_one_line(tmp_path, capsys):
    for path in (tmp_path / "none.toml", tmp_path):
        assert main(["serve", "--config", str(path)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"--config {path}: " in line
