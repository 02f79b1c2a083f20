"""Which runner serves a configuration, and what is imported for it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from streamkv.config import EngineConfig
from streamkv.errors import ConfigError
from streamkv.runner import select
from streamkv.runner.cpu_runner import CpuRunner, EagerCpuRunner
from streamkv.runner.select import build_runner
from streamkv.runner.torch_runner import TorchRunner
from streamkv.weights.hub import Checkpoint

NOWHERE = Checkpoint(Path("nowhere"), "huggingface")


def build(**config) -> object:
    return build_runner(EngineConfig(**config), NOWHERE)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"device": "cpu"}, CpuRunner),
        ({"device": "cpu", "ops": "native"}, CpuRunner),
        ({"ops": "native"}, CpuRunner),
        ({"device": "cpu", "enforce_eager": True}, EagerCpuRunner),
        ({"device": "cpu", "ops": "reference"}, TorchRunner),
    ],
)
def test_the_configuration_names_the_runner(config, expected):
    assert type(build(**config)) is expected


def test_a_program_is_served_natively_and_single_operations_are_not():
    """DeviceThread keeps the thread in native code for a runner that has `serve`."""
    assert hasattr(build(device="cpu"), "serve")
    assert not hasattr(build(device="cpu", enforce_eager=True), "serve")


@pytest.mark.parametrize("is_driver_there", [False, True])
@pytest.mark.parametrize("is_device_there", [False, True])
def test_auto_is_the_gpu_where_there_is_one(
    monkeypatch, tmp_path, is_driver_there, is_device_there
):
    """A driver without a device is a machine whose GPU was taken away."""
    (tmp_path / "nvidiactl").touch()
    name = "nvidiactl" if is_driver_there else "nothing"
    monkeypatch.setattr(select, "CUDA_DEVICE_FILES", (str(tmp_path / name),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_device_there)
    expected = TorchRunner if is_driver_there and is_device_there else CpuRunner
    assert type(build()) is expected


def test_a_cuda_device_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="use --device cpu"):
        build(device="cuda")


def test_native_kernels_on_a_gpu_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="use --ops reference on a GPU"):
        build(device="cuda", ops="native")


def test_single_native_operations_are_refused_where_torch_would_run(monkeypatch, tmp_path):
    with pytest.raises(ConfigError, match="--enforce-eager is for the native kernels"):
        build(device="cpu", ops="reference", enforce_eager=True)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(select, "CUDA_DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="--enforce-eager is for the native kernels"):
        build(enforce_eager=True)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"quantization": "int8"}, "--quantization int8: the native kernels compute with it"),
        ({"quantization": "int4"}, "--quantization int4: "),
        ({"kv_cache_dtype": "int8"}, "--kv-cache-dtype int8: "),
        ({"kv_cache_dtype": "float32"}, "--kv-cache-dtype float32: "),  # of a model in bfloat16
        ({"kv_cache_dtype": "bfloat16", "dtype": "float32"}, "--kv-cache-dtype bfloat16: "),
    ],
)
def test_formats_that_torch_does_not_compute_with_are_refused(monkeypatch, tmp_path, wish, message):
    with pytest.raises(ConfigError, match=f"^{message}.*--ops reference is plain torch"):
        build(device="cpu", ops="reference", **wish)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(select, "CUDA_DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for device in ("auto", "cuda"):
        with pytest.raises(ConfigError, match=f"^{message}.* leave "):
            build(device=device, **wish)
    assert type(build(device="cpu", **wish)) is CpuRunner


@pytest.mark.parametrize(
    "wish",
    [
        {"quantization": "none"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "float32", "dtype": "float32"},
    ],
)
def test_formats_that_torch_has_anyway_are_granted(wish):
    assert type(build(device="cpu", ops="reference", **wish)) is TorchRunner


def test_without_torch_a_gpu_is_left_alone_and_what_needs_torch_is_refused(
    monkeypatch, tmp_path, caplog
):
    monkeypatch.setitem(sys.modules, "torch", None)
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(select, "CUDA_DEVICE_FILES", (str(tmp_path / "nvidiactl"),))
    assert type(build()) is CpuRunner
    assert "torch isn't installed" in caplog.text
    for config in ({"device": "cuda"}, {"device": "cpu", "ops": "reference"}):
        with pytest.raises(ConfigError, match="need torch, which can't be imported"):
            build(**config)


def test_choosing_a_cpu_runner_imports_no_torch():
    program = """
import sys
from pathlib import Path
from streamkv.config import EngineConfig
from streamkv.runner import select
from streamkv.weights.hub import Checkpoint
select.CUDA_DEVICE_FILES = ("/dev/there is no driver",)
select.build_runner(EngineConfig(), Checkpoint(Path("nowhere"), "huggingface"))
sys.exit("torch" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
