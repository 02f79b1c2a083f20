"""transformers in float32 on the weights of a loaded model: the same numbers, by other code.

Owns the way from our weights to its. What it is given is what the kernels multiply with, widened:
what is left between the two are inputs, keys and values of fewer bits, and the order of sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..ops import Parameter
from .text import Window

DTYPE_KEYS = ("dtype", "torch_dtype")  # of config.json: what the checkpoint is, not what we want


class Oracle:
    """Computes as NativeModel does."""

    def __init__(
        self,
        config: Mapping[str, Any],
        parameters: Sequence[Parameter],
        weights: Mapping[str, Any],
        num_threads: int,
    ) -> None:
        """`config` is what config.json says; `weights` are packed. ConfigError without torch."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"--transformers needs torch and transformers: {error}") from error
        self._torch = torch
        self._generation_type: Any = transformers.GenerationConfig
        torch.set_num_threads(num_threads)
        model_type: Any = getattr(transformers, config["architectures"][0])
        fields = {name: one for name, one in config.items() if name not in DTYPE_KEYS}
        plain = model_type.config_class()
        if not hasattr(plain, "rope_parameters"):  # transformers before version 5
            rope = fields.pop("rope_parameters", {})
            fields.setdefault("rope_theta", rope.get("rope_theta", plain.rope_theta))
            fields["rope_scaling"] = rope if rope.get("rope_type", "default") != "default" else None
        self._model = model_type(model_type.config_class(**fields)).float().eval()
        self._fill(parameters, weights)

    def predictions(self, window: Window) -> Iterator[NDArray[np.float32]]:
        """As NativeModel.predictions, in the same pieces."""
        wanted = [piece.num_wanted for piece in window.pieces() if piece.num_wanted]
        with self._torch.inference_mode():
            logits = self._model(
                self._ids([window.token_ids[:-1]]), use_cache=False, logits_to_keep=sum(wanted)
            ).logits
        yield from (piece.numpy() for piece in logits[0].split(wanted))

    def continuations(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> NDArray[np.int32]:
        """As NativeModel.continuations."""
        token_ids = self._ids(prompts)
        config = self._generation_type(
            do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        )
        with self._torch.inference_mode():
            found = self._model.generate(
                token_ids,
                generation_config=config,
                attention_mask=self._torch.ones_like(token_ids),
            )
        continued: NDArray[np.int32] = found[:, token_ids.shape[1] :].numpy().astype(np.int32)
        return continued

    def _ids(self, rows: Sequence[Sequence[int]]) -> Any:
        return self._torch.tensor(rows, dtype=self._torch.long)

    def _fill(self, parameters: Sequence[Parameter], weights: Mapping[str, Any]) -> None:
        own = dict(self._model.named_parameters())
        with self._torch.no_grad():
            for parameter in parameters:
                first = 0
                for name, shape in parameter.parts:
                    values = _rows(weights[parameter.name], first, shape[0])
                    own.pop(name).copy_(self._torch.from_numpy(values))
                    first += shape[0]
        if own:
            raise ConfigError(f"--transformers: its model has other weights, such as {min(own)}")


def _rows(weight: Any, first: int, num_rows: int) -> NDArray[np.float32]:
    if isinstance(weight, np.ndarray):
        return weight[first : first + num_rows].copy()
    rows: NDArray[np.float32] = weight.unpack(first, num_rows)
    return rows
