"""What the native kernels can't compute, in the words of the checkpoint.

Owns the sizes they have code for; the extension checks the same ones again. Knows no kernels and no
files. Invariant: what passes here loads; what doesn't is said before weights are read.
"""

from __future__ import annotations

from ..errors import ModelLoadError
from ..models import CausalLM
from ..weights.formats import Formats, is_quantized

HEAD_DIM_MULTIPLE = 16
MAX_HEAD_DIM = 256


def check_native(model: CausalLM, formats: Formats) -> None:
    """ModelLoadError for a model, its matrices in these formats, that needs --ops reference."""
    head_dim = model.config.head_dim
    if head_dim % HEAD_DIM_MULTIPLE or head_dim > MAX_HEAD_DIM:
        raise _unsupported(
            f"heads of a multiple of {HEAD_DIM_MULTIPLE} up to {MAX_HEAD_DIM}", f"{head_dim}"
        )
    for one in model.parameters():
        if len(one.shape) == 2 and one.shape[1] % 2 and not is_quantized(one, formats):
            raise _unsupported(
                "an even number of inputs where weights are floats",
                f"{one.shape[1]} of {one.parts[0][0]}",
            )


def _unsupported(expected: str, got: str) -> ModelLoadError:
    return ModelLoadError(
        f"the native kernels can't run this model: expected {expected}, got {got}; "
        "use --ops reference, which is slow and needs torch"
    )
