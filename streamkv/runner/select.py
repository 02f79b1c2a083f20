"""Which runner serves a configuration. The one place that decides, once, at start.

Imports a runner only when it is the one: torch is not loaded for a CPU. Invariant: what was asked
for is what runs, or ConfigError says why not.
"""

from __future__ import annotations

import logging
import os
from typing import Literal

from ..config import EngineConfig
from ..errors import ConfigError
from ..protocol import Runner
from ..weights.hub import Checkpoint
from .kv_cache import MemoryBudget

logger = logging.getLogger(__name__)

# The drivers' own: NVIDIA's, the one of its embedded boards, and the one inside WSL.
CUDA_DEVICE_FILES = ("/dev/nvidiactl", "/dev/nvhost-gpu", "/dev/dxg")


def build_runner(
    config: EngineConfig, checkpoint: Checkpoint, budget: MemoryBudget | None = None
) -> Runner:
    """A runner that has still to `load`. `budget` is shared by the models of a process; None:
    one of its own. ConfigError."""
    check_config(config)
    if not runs_on_torch(config):
        from .cpu_runner import CpuRunner, EagerCpuRunner

        runner_type = EagerCpuRunner if config.enforce_eager else CpuRunner
        return runner_type(config, checkpoint, budget)
    if config.enforce_eager:
        raise _unused_enforce_eager("a GPU runs")
    _check_torch_formats(config, "a GPU runs")
    _require_torch()
    from .torch_runner import TorchRunner

    return TorchRunner(config, checkpoint, budget)


def runs_on_torch(config: EngineConfig) -> bool:
    """Else on the native kernels. ConfigError for a device that isn't here."""
    return _select_device(config) == "cuda" or config.ops == "reference"


def check_config(config: EngineConfig) -> None:
    """ConfigError for wishes that no machine can grant together, and for a device that isn't
    here."""
    if config.device == "cuda" and config.ops == "native":
        raise ConfigError(
            "--ops native: the native kernels run on a CPU; use --ops reference on a GPU"
        )
    if config.enforce_eager and config.ops == "reference":
        raise _unused_enforce_eager("--ops reference is")
    if config.ops == "reference":
        _check_torch_formats(config, "--ops reference is")
    if config.device == "cuda":
        _check_torch_formats(config, "--device cuda runs")
        _select_device(config)


def _unused_enforce_eager(who: str) -> ConfigError:
    return ConfigError(
        f"--enforce-eager is for the native kernels, and {who} plain torch, which runs operations "
        "one by one anyway; leave --enforce-eager out, or use --ops native"
    )


def _check_torch_formats(config: EngineConfig, who: str) -> None:
    """ConfigError for formats that only the native kernels know."""
    asked: dict[str, str] = {}
    if config.quantization in ("int8", "int4"):
        asked["--quantization"] = config.quantization
    dtype = "bfloat16" if config.dtype == "auto" else config.dtype
    if config.kv_cache_dtype not in ("auto", dtype):
        asked["--kv-cache-dtype"] = config.kv_cache_dtype
    for flag, value in asked.items():
        raise ConfigError(
            f"{flag} {value}: the native kernels compute with it, and {who} plain torch, which "
            f"computes with --dtype alone; leave {flag} out, or use --device cpu with --ops native"
        )


def _select_device(config: EngineConfig) -> Literal["cpu", "cuda"]:
    if config.device == "cpu" or (config.device == "auto" and config.ops == "native"):
        return "cpu"
    if config.device == "auto" and not any(os.path.exists(path) for path in CUDA_DEVICE_FILES):
        return "cpu"
    if _has_cuda(config):
        return "cuda"
    if config.device == "cuda":
        raise ConfigError(
            "--device cuda: expected a CUDA device, torch finds none; use --device cpu"
        )
    return "cpu"


def _has_cuda(config: EngineConfig) -> bool:
    try:
        import torch
    except ImportError:
        if config.device == "auto":
            logger.warning("there is a GPU, but torch isn't installed: running on the CPU")
            return False
        _require_torch()
    return torch.cuda.is_available()


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"GPUs and --ops reference need torch, which can't be imported ({error}); "
            "install torch, or use --device cpu with --ops native"
        ) from error
