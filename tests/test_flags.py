"""Flags, environment names and their help come from the config fields and nothing else."""

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from streamkv import flags_page
from streamkv.bench.options import LoadConfig
from streamkv.cli import main
from streamkv.config import EngineConfig, ServerConfig
from streamkv.errors import ConfigError
from streamkv.fields import fields_of
from streamkv.flags import add_flags, build_config

PAGE = Path(__file__).parents[1] / "docs" / "flags.md"


def parse(*arguments: str, environ: dict[str, str] | None = None) -> EngineConfig:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig)
    return build_config(EngineConfig, vars(parser.parse_args(arguments)), environ or {})


@pytest.mark.parametrize("config_type", [EngineConfig, ServerConfig])
def test_every_field_has_a_flag_and_the_flag_sets_it(config_type):
    parser = argparse.ArgumentParser()
    add_flags(parser, config_type)
    for field in fields_of(config_type):
        if field.name.endswith("parallel_size"):
            continue  # 1 is all that these can be
        arguments = [field.flag, "x"]
        expected = ("x",) if field.repeats else "x"
        if field.choices:
            arguments[1] = expected = field.choices[-1]
        elif field.type is bool:
            expected = not field.default
            arguments = [f"--{'' if expected else 'no-'}{field.flag[2:]}"]
        elif field.type in (int, float):
            expected = field.default + 1 if field.type is int else 1.0
            arguments[1] = str(expected)
        assert expected != field.default
        config = build_config(config_type, vars(parser.parse_args(arguments)), {})
        assert getattr(config, field.name) == expected


def test_help_names_every_flag(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    help_text = capsys.readouterr().out
    for field in fields_of(EngineConfig) + fields_of(ServerConfig):
        assert f"{field.flag} " in help_text
    assert "--load-format" not in help_text  # of vLLM: taken, not shown


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
    environ = {"STREAMKV_ALLOWED_ORIGINS": "http://a, http://b"}
    assert build_config(ServerConfig, {}, environ).allowed_origins == ("http://a", "http://b")


@pytest.mark.parametrize(
    "arguments",
    [
        ["m", "--concurrency", "1", "8", "--concurrency", "32", "--prompt-seed", "5"],
        ["--concurrency", "1", "8", "32", "m", "--prompt-seed", "5"],
        ["--prompt-seed", "5", "--concurrency", "1", "--concurrency=8", "--concurrency", "32", "m"],
        ["--concurrency", "1", "8", "32", "--prompt-seed", "5", "m"],
    ],
)
def test_lists_of_numbers_leave_a_model_alone_wherever_it_stands(arguments, monkeypatch):
    seen: list[tuple[str, LoadConfig]] = []
    monkeypatch.setattr(
        "streamkv.bench.throughput.bench_throughput",
        lambda engine_config, options: seen.append((engine_config.model, options)) or 0,
    )
    assert main(["bench", "throughput", *arguments]) == 0
    assert seen == [("m", LoadConfig(concurrency=(1, 8, 32), prompt_seed=5))]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["throughput", "a", "--concurrency", "1", "b"], "expected one model, got 'a' and 'b'"),
        (["throughput", "--concurrency", "1", "b", "--prompt-seed", "1", "a"], "got 'a' and 'b'"),
        (["throughput", "--concurrency", "b"], "--concurrency: expected a whole number >= 1 and"),
        (["throughput", "--concurrency", "8", "0"], ">= 1 and <= 1048576, got '0'"),
        (["kernels", "--decode-rows", "1", "b"], "--decode-rows: expected a whole number >= 1 and"),
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


@pytest.fixture
def serve(served):
    """What `streamkv serve` would serve."""

    def ask(*arguments: str) -> tuple[EngineConfig, ServerConfig]:
        assert main(["serve", *arguments]) == 0
        return served.pop()

    return ask


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--max_num_seqs", "8", "--no-enable_prefix_caching"], {"max_num_seqs": 8}),
        (["--max_model_len=4k"], {"max_model_len": 4000}),
        (["--max-model-len", "4K"], {"max_model_len": 4096}),
        (["--kv-cache-memory", "0.1G"], {"kv_cache_memory_bytes": 107374182}),
        (["--kv-cache-memory-bytes", "1.5K"], {"kv_cache_memory_bytes": 1536}),
        (["--max-model-len", "2.5k", "-tp", "1", "-pp", "1"], {"max_model_len": 2500}),
        (["--max-model-len", "auto"], {"max_model_len": 0}),
        (["--max-model-len=-1"], {"max_model_len": 0}),
        (["--dtype", "float", "-q", "gguf"], {"dtype": "float32", "quantization": "auto"}),
        (["--model", "a_b"], {"model": "a_b"}),
        (["m", "--served-model-name", "a", "b"], {"model": "m", "model_ids": ("a", "b")}),
        (["--served-model-name", "a", "m"], {"model": "m", "model_ids": ("a",)}),
        (["--served-model-name", "a", "b", "m"], {"model": "m", "model_ids": ("a", "b")}),
        (["--model", "m", "--served-model-name", "a", "b"], {"model_ids": ("a", "b")}),
        (["m"], {"model_id": "m", "model_ids": ("m",)}),
        (
            ["--served-model-name", "a", "b", "--model", "m"],
            {"model": "m", "model_ids": ("a", "b")},
        ),
        (["--served-model-name", "a", "b", "--seed", "1", "m"], {"model_ids": ("a", "b")}),
        (["m", "--served-model-name", "a", "b", "a"], {"model_ids": ("a", "b")}),
        (["--enforce-eager", "True", "m"], {"model": "m", "enforce_eager": True}),
        (["--enforce-eager=true", "m"], {"model": "m", "enforce_eager": True}),
        (["--async_scheduling=False", "m"], {"model": "m", "async_scheduling": False}),
        (["--no-async-scheduling", "false", "m"], {"model": "m", "async_scheduling": True}),
        (["--enforce-eager", "m"], {"model": "m", "enforce_eager": True}),
        (["--gpu-memory-utilization", ".5"], {"gpu_memory_utilization": 0.5}),
        (["--max-num-seqs", "+3", "--block-size", " 4"], {"max_num_seqs": 3, "block_size": 4}),
    ],
)
def test_spellings_of_scripts_for_vllm(arguments, expected, serve):
    engine_config, _ = serve(*arguments)
    assert {name: getattr(engine_config, name) for name in expected} == expected


def test_lists_of_the_server_come_as_words_or_json(serve):
    _, config = serve("m", "--api-key", "a", "b", "--allowed-origins", '["https://x", "https://y"]')
    assert config.api_key == ("a", "b")
    assert config.allowed_origins == ("https://x", "https://y")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-model-len", "2.5K"], "--max-model-len: expected a whole number >= 0, got '2.5K'"),
        (["--kv-cache-memory", "8GB"], "bytes: expected bytes >= 0, as 8G or 0.5G, got '8GB'"),
        (["--max-body-bytes", "0.5"], "-bytes: expected bytes >= 1024, as 8G or 0.5G, got '0.5'"),
        (["--preemption-mode", "swap", "--kv-cache-dir", "kv"], "swap needs --swap-space, got 0 G"),
        (["--dtype", "half"], "expected one of auto, bfloat16, float32, got 'half'"),
        (["-tp", "2"], "tensor_parallel_size (--tensor-parallel-size): expected 1, got 2"),
        (["--model", "a", "b"], "expected one model, got 'b' and --model 'a'"),
        (["--served-model-name", ""], "(--served-model-name): expected a name, got an empty one"),
        (["--config", ""], "--config: expected a TOML file, got an empty name"),
        (["--gpu-memory-utilization", "nan"], "expected a number > 0 and <= 1, got 'nan'"),
    ],
)
def test_what_cannot_be_is_one_line(arguments, message, capsys):
    assert main(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_variable_that_nothing_reads_is_named(serve, monkeypatch, capsys):
    monkeypatch.setenv("STREAMKV_MAX_NUM_SEQ", "3")
    monkeypatch.setenv("STREAMKV_CACHE", "/nowhere")
    monkeypatch.setenv("STREAMKV_DTYPE", "float32")
    monkeypatch.setenv("STREAMKV_LOAD_FORMAT", "auto")
    serve("m")
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith(": STREAMKV_MAX_NUM_SEQ (did you mean STREAMKV_MAX_NUM_SEQS?)")


def test_a_variable_that_asks_for_what_can_not_be_had_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("STREAMKV_TOOL_SERVER", "demo")
    assert main(["serve", "m"]) == 2
    assert "STREAMKV_TOOL_SERVER: " in capsys.readouterr().err


def test_a_prompt_may_be_a_word_for_true(monkeypatch):
    seen: list[tuple[bool, tuple[str, ...]]] = []
    monkeypatch.setattr(
        "streamkv.commands.generate.generate",
        lambda config, options, prompts: seen.append((options.chat, prompts)) or 0,
    )
    assert main(["generate", "--chat", "yes"]) == 0
    assert main(["generate", "--chat=false", "yes"]) == 0
    assert seen == [(True, ("yes",)), (False, ("yes",))]


@pytest.mark.parametrize("arguments", [["--max-num-seq", "4"], ["a", "b"], ["--port"]])
def test_wrong_usage_is_one_line_that_says_where_help_is(arguments, capsys):
    with pytest.raises(SystemExit) as raised:
        main(["serve", *arguments])
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("streamkv serve: ") and "streamkv serve --help" in line
    assert ("did you mean --max-num-seqs?" in line) == ("--max-num-seq" in arguments)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"max_model_len": -2}, r"max_model_len (--max-model-len): expected a whole number >= 0"),
        ({"block_size": True}, "block_size (--block-size): expected a whole number >= 1 and"),
        ({"dtype": "half"}, "dtype (--dtype): expected one of auto, bfloat16, float32"),
        ({"served_model_name": 5}, "served_model_name (--served-model-name): expected text, got 5"),
        ({"enforce_eager": "yes"}, "enforce_eager (--enforce-eager): expected true or false"),
    ],
)
def test_a_config_made_in_python_is_checked_too(wish, message):
    with pytest.raises(ConfigError) as raised:
        EngineConfig(**wish)
    assert message in str(raised.value)


def test_a_config_made_in_python_takes_what_flags_take(tmp_path):
    config = EngineConfig(model=tmp_path, served_model_name="n", max_model_len="8k", dtype="float")
    assert (config.model, config.model_ids) == (str(tmp_path), ("n",))
    assert (config.max_model_len, config.dtype) == (8000, "float32")


def test_the_page_of_flags_is_current():
    assert PAGE.read_text() == flags_page.page(), "run `make docs`"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("abc", "--block-size: expected a whole number >= 1 and <= 1024, got 'abc'"),
        ("0", "--block-size: expected a whole number >= 1 and <= 1024, got '0'"),
        ("1.5", "--block-size: expected a whole number >= 1 and <= 1024, got '1.5'"),
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


@pytest.mark.parametrize("command", ["info", "serve"])
def test_memory_that_runs_out_is_one_line(command, capsys, monkeypatch):
    def resolve(*arguments, **options):
        raise MemoryError

    monkeypatch.setattr("streamkv.weights.hub.resolve_checkpoint", resolve)
    assert main([command, "a-model", *(["--port", "0"] if command == "serve" else [])]) == 1
    error = capsys.readouterr().err
    assert "streamkv: out of memory" in error.splitlines()[-1] and "Traceback" not in error


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
