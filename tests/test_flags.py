"""Flags, environment names and their help come from the config fields and nothing else."""

import argparse
import subprocess
import sys

import pytest

from streamkv.bench.options import LoadConfig
from streamkv.cli import build_parser, main
from streamkv.config import EngineConfig, ServerConfig
from streamkv.errors import ConfigError
from streamkv.flags import add_flags, build_config, flags_of


def parse(*arguments: str, environ: dict[str, str] | None = None) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    return build_config(EngineConfig, vars(parser.parse_args(arguments)), environ or {})


def test_every_field_has_a_flag_and_the_flag_sets_it():
    config = parse("--max-num-seqs", "8", "--gpu-memory-utilization", "0.5", "--dtype", "float32")
    assert (config.max_num_seqs, config.gpu_memory_utilization, config.dtype) == (8, 0.5, "float32")
    help_text = build_parser()._subparsers._group_actions[0].choices["serve"].format_help()
    for flag in flags_of(EngineConfig) + flags_of(ServerConfig):
        assert flag.name in help_text


def test_threads_and_eager_execution_are_the_operators_choice():
    assert (parse().threads, parse().enforce_eager) == (0, False)
    config = parse("--threads", "3", "--enforce-eager")
    assert (config.threads, config.enforce_eager) == (3, True)
    environ = {"STREAMKV_THREADS": "5", "STREAMKV_ENFORCE_EAGER": "1"}
    config = parse("--no-enforce-eager", environ=environ)
    assert (config.threads, config.enforce_eager) == (5, False)


def test_a_flag_beats_the_environment_which_beats_the_default():
    environ = {"STREAMKV_BLOCK_SIZE": "32", "STREAMKV_ENABLE_PREFIX_CACHING": "false"}
    assert parse(environ=environ).block_size == 32
    assert parse(environ=environ).enable_prefix_caching is False
    assert parse("--block-size", "8", environ=environ).block_size == 8
    assert parse("--enable-prefix-caching", environ=environ).enable_prefix_caching is True
    assert parse().block_size == EngineConfig().block_size


def test_repeated_flags_and_comma_separated_environment_make_lists():
    parser = argparse.ArgumentParser()
    add_flags(parser, ServerConfig)
    given = vars(parser.parse_args(["--api-key", "a", "--api-key", "b"]))
    assert build_config(ServerConfig, given, {}).api_key == ("a", "b")
    assert build_config(ServerConfig, {}, {"STREAMKV_API_KEY": "a,b"}).api_key == ("a", "b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--concurrency", "1", "8", "--concurrency", "32", "--seed", "5"],
        ["--concurrency", "1", "8", "32", "m", "--seed", "5"],
        ["--seed", "5", "--concurrency", "1", "--concurrency=8", "--concurrency", "32", "m"],
        ["--concurrency", "1", "8", "32", "--seed", "5", "m"],
    ],
)
def test_lists_of_numbers_leave_a_model_alone_wherever_it_stands(arguments, monkeypatch):
    seen: list[tuple[str, LoadConfig]] = []
    monkeypatch.setattr(
        "streamkv.bench.throughput.bench_throughput",
        lambda engine_config, options: seen.append((engine_config.model, options)) or 0,
    )
    assert main(["bench", "throughput", *arguments]) == 0
    assert seen == [("m", LoadConfig(concurrency=(1, 8, 32), seed=5))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "a", "--concurrency", "1", "b"], "expected one model, got 'a' and 'b'"),
        (["throughput", "--concurrency", "1", "b", "--seed", "1", "a"], "got 'a' and 'b'"),
        (["throughput", "--concurrency", "b"], "--concurrency: expected a whole number, got 'b'"),
        (["throughput", "--concurrency", "8", "0"], "expected a whole number >= 1, got '0'"),
        (["kernels", "--decode-rows", "1", "b"], "--decode-rows: expected a whole number, got 'b'"),
    ],
)
def test_a_wrong_word_in_a_list_is_one_line(arguments, message, capsys):
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert message in line


def test_help_shows_lists_as_they_are_typed(capsys):
    for command in (["info"], ["bench", "throughput"]):
        with pytest.raises(SystemExit):
            main([*command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        assert "(default: 1 8 32)" in text and "N [N ...]" in text
        assert "last line is a JSON document" in text


@pytest.mark.parametrize(
    ("arguments", "environ", "named"),
    [
        (["--block-size", "0"], {}, "--block-size"),
        (["--block-size", "many"], {}, "--block-size"),
        (["--threads", "-1"], {}, "--threads"),
        ([], {"STREAMKV_THREADS": "2000"}, "STREAMKV_THREADS"),
        ([], {"STREAMKV_ENFORCE_EAGER": "2"}, "STREAMKV_ENFORCE_EAGER"),
        (["--gpu-memory-utilization", "1.5"], {}, "--gpu-memory-utilization"),
        ([], {"STREAMKV_MAX_NUM_SEQS": "-1"}, "STREAMKV_MAX_NUM_SEQS"),
        ([], {"STREAMKV_ASYNC_SCHEDULING": "maybe"}, "STREAMKV_ASYNC_SCHEDULING"),
        ([], {"STREAMKV_DTYPE": "int3"}, "STREAMKV_DTYPE"),
    ],
)
def test_a_wrong_value_is_an_error_that_names_its_source(arguments, environ, named):
    with pytest.raises(ConfigError, match=named):
        parse(*arguments, environ=environ)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "--block-size: expected a whole number, got 'abc'"),
        ("0", "--block-size: expected a whole number >= 1, got '0'"),
        ("1.5", "--block-size: expected a whole number, got '1.5'"),
    ],
)
def test_a_wrong_number_says_what_was_expected(value, message):
    with pytest.raises(ConfigError) as raised:
        parse("--block-size", value)
    assert str(raised.value) == message


def test_a_wrong_choice_in_the_environment_lists_the_choices():
    with pytest.raises(ConfigError, match="expected one of auto, bfloat16, float32, got 'fp16'"):
        parse(environ={"STREAMKV_DTYPE": "fp16"})


def test_wrong_usage_exits_2_and_a_missing_model_exits_1_with_one_line(capsys, tmp_path):
    assert main(["serve", "--port", "0", "--block-size", "0"]) == 2
    assert main(["serve", "--port", "0", "one-model", "--model", "another"]) == 2
    capsys.readouterr()
    assert main(["serve", "--port", "0", str(tmp_path / "nothing.gguf")]) == 1
    *_, last = capsys.readouterr().err.strip().splitlines()
    assert last.startswith("streamkv: ") and "nothing.gguf" in last


@pytest.mark.parametrize("size", ["inf", "1e308", "nan", "-1"])
def test_a_cache_of_no_possible_size_is_wrong_usage(capsys, size, tmp_path):
    wish = ["serve", str(tmp_path / "none.gguf"), "--port", "0", f"--packed-cache-gib={size}"]
    assert main(wish) == 2
    assert "--packed-cache-gib" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " ", "key ", "\n"])
def test_an_empty_or_padded_api_key_is_wrong_usage_that_names_the_flag(capsys, monkeypatch, key):
    assert main(["serve", "--port", "0", "--api-key", "good", "--api-key", key]) == 2
    assert "--api-key" in (error := capsys.readouterr().err) and "good" not in error
    monkeypatch.setenv("STREAMKV_API_KEY", key)
    assert main(["serve", "--port", "0"]) == 2
    assert "STREAMKV_API_KEY" in capsys.readouterr().err


def test_help_imports_neither_torch_nor_transformers_nor_the_server():
    probe = (
        "import sys; sys.argv = ['streamkv', '--help']\n"
        "from streamkv.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'starlette', 'uvicorn', 'numpy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "streamkv serve" in done.stdout
