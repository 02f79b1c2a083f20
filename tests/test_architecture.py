"""The layer rules of docs/design.md, read from the source with `ast`."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "streamkv"

LAYERS = {  # package or module → layer; imports point to a lower layer or stay inside
    "cache": 0,
    "checks": 0,
    "config": 0,
    "errors": 0,
    "fields": 0,
    "files": 0,
    "plain": 0,
    "progress": 0,
    "protocol": 0,
    "sampling": 0,
    "step_bytes": 0,
    "structured": 0,
    "vllm_options": 0,
    "words": 0,
    "core": 1,
    "ops": 1,
    "text": 1,
    "models": 2,
    "weights": 2,
    "runner": 3,
    "engine": 4,
    "server": 5,
    "bench": 6,
    "eval": 6,
    "info": 6,
    "inputs": 6,
    "outputs": 6,
    "sampling_params": 6,
    "flags": 6,
    "commands": 6,
    "config_file": 6,
    "variables": 6,
    "flags_page": 6,
    "entrypoints": 6,
    "call": 6,
    "cli": 6,
    "command_table": 6,
    "healthcheck": 6,
    "__main__": 6,
}
SAME_LAYER = {  # the few siblings that may see each other
    ("cache", "errors"),
    ("checks", "errors"),
    ("checks", "plain"),
    ("config", "errors"),
    ("config", "fields"),
    ("fields", "errors"),
    ("fields", "plain"),
    ("vllm_options", "errors"),
    ("vllm_options", "config"),
    ("files", "errors"),
    ("protocol", "sampling"),
    ("sampling", "checks"),
    ("sampling", "errors"),
    ("sampling", "structured"),
    ("step_bytes", "protocol"),
    ("structured", "checks"),
    ("structured", "errors"),
    ("vllm_options", "fields"),
    ("weights", "models"),  # loading needs the facts a model is built from
    ("flags", "config_file"),
    ("flags_page", "flags"),
    ("call", "config_file"),
    ("call", "flags"),
    ("call", "variables"),
    ("cli", "call"),
    ("cli", "command_table"),
    ("cli", "commands"),
    ("cli", "flags"),
    ("cli", "variables"),
    ("command_table", "bench"),
    ("command_table", "call"),
    ("command_table", "commands"),
    ("command_table", "eval"),
    ("command_table", "info"),
    ("entrypoints", "__main__"),
    ("healthcheck", "call"),
    ("healthcheck", "cli"),
    ("info", "bench"),
    ("eval", "bench"),
    ("__main__", "cli"),
}
TORCH_MODULES = (
    "runner/torch_runner.py",
    "runner/torch_ops.py",
    "runner/torch_sampling.py",
    "runner/sampler.py",
    "runner/select.py",  # only to ask it for a GPU, where there is a driver
    "ops/reference.py",
    "ops/kernels.py",
    "weights/torch_loader.py",
    "eval/oracle.py",
    "bench/one_by_one.py",
)


def modules() -> list[Path]:
    return sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def imported_names(path: Path, *, top_level_only: bool = False) -> set[str]:
    """Absolute dotted names of everything the module imports."""
    tree = ast.parse(path.read_text())
    package = ("streamkv", *path.relative_to(PACKAGE).parts[:-1])
    names: set[str] = set()
    nodes = tree.body if top_level_only else ast.walk(tree)
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            prefix = ".".join((*base, *(node.module or "").split("."))).strip(".")
            names |= {f"{prefix}.{alias.name}" for alias in node.names}
    return names


def owner(name: str) -> str | None:
    """`streamkv.core.scheduler.Scheduler` → `core`."""
    parts = name.split(".")
    return parts[1] if parts[0] == "streamkv" and len(parts) > 1 else None


@pytest.mark.parametrize("path", modules(), ids=relative)
def test_imports_point_down(path):
    here = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    for name in imported_names(path):
        there = owner(name)
        if there is None or there == here or there not in LAYERS:
            continue
        allowed = LAYERS[there] < LAYERS[here] or (here, there) in SAME_LAYER
        assert allowed, f"{relative(path)} (L{LAYERS[here]}) imports {name} (L{LAYERS[there]})"


def test_core_is_standard_library_only_and_has_no_clock_threads_or_randomness():
    banned = {"asyncio", "threading", "time", "random", "datetime", "secrets", "concurrent"}
    for path in (PACKAGE / "core").glob("*.py"):
        for name in imported_names(path):
            root = name.split(".")[0]
            assert root == "streamkv" or root in sys.stdlib_module_names, f"{path.name}: {name}"
            assert root not in banned, f"{path.name}: {name}"


def test_torch_is_named_only_where_the_torch_runner_needs_it():
    named = {
        relative(path)
        for path in modules()
        if "torch" in {name.split(".")[0] for name in imported_names(path)}
    }
    assert named == set(TORCH_MODULES)


def test_asyncio_lives_where_an_engine_is_run():
    for path in modules():
        if any(name.split(".")[0] == "asyncio" for name in imported_names(path)):
            assert relative(path).startswith(("engine/", "server/", "bench/", "commands/")), (
                relative(path)
            )


def test_the_server_knows_neither_core_nor_runner():
    for path in (PACKAGE / "server").glob("*.py"):
        assert not {owner(name) for name in imported_names(path)} & {"core", "runner", "ops"}


def test_the_engine_knows_the_runner_only_where_it_builds_one():
    for path in (PACKAGE / "engine").glob("*.py"):
        top = {owner(name) for name in imported_names(path, top_level_only=True)}
        assert not top & {"runner", "models"}, path.name


def test_loadtest_imports_nothing_from_streamkv():
    for path in (PACKAGE.parent / "loadtest").glob("*.py"):
        tree = ast.parse(path.read_text())
        roots = {
            alias.name.split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.Import)
            for alias in node.names
        } | {
            (node.module or "").split(".")[0]
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom)
        }
        assert "streamkv" not in roots, path.name


@pytest.mark.parametrize(
    "module",
    [
        "streamkv",
        "streamkv.engine.async_engine",
        "streamkv.server.app",
        "streamkv.models",
        "streamkv.weights.loader",
        "streamkv.runner.select",
        "streamkv.runner.cpu_runner",
    ],
)
def test_importing_it_loads_neither_torch_nor_transformers(module):
    probe = (
        f"import sys, {module}; loaded = {{'torch', 'transformers'}} & set(sys.modules); "
        "sys.exit(f'loaded {loaded}' if loaded else 0)"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_public_names_are_all_importable():
    import streamkv

    assert sorted(streamkv.__all__) == sorted(streamkv._EXPORTS)
    for name in streamkv.__all__:
        assert getattr(streamkv, name).__name__ == name
