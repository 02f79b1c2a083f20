"""transformers' own `generate`, a prompt after the other, as a script without an engine has it.

Owns the call. Invariant: greedy and of fixed length, on the threads that torch takes by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..errors import ConfigError


class OneByOne:
    """A checkpoint in Hugging Face format, as transformers runs it."""

    def __init__(self, folder: str, dtype: str) -> None:
        """ConfigError without torch and transformers."""
        try:
            import torch
            import transformers
        except ImportError as error:
            raise ConfigError(f"--transformers needs torch and transformers: {error}") from error
        self._torch = torch
        self._generation_type: Any = transformers.GenerationConfig
        logging: Any = transformers.utils.logging
        logging.disable_progress_bar()
        model_type: Any = transformers.AutoModelForCausalLM
        self._model = model_type.from_pretrained(folder, dtype=dtype, trust_remote_code=False)
        # What a call leaves open, "no end token" among it, is filled in from here.
        self._model.generation_config = type(self._model.generation_config)()

    def generate(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> int:
        """Answer each with so many tokens; returns how many there are in all."""
        config = self._generation_type(
            do_sample=False, max_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        )
        total = 0
        for prompt in prompts:
            token_ids = self._torch.tensor([prompt], dtype=self._torch.long)
            with self._torch.inference_mode():
                found = self._model.generate(
                    token_ids,
                    generation_config=config,
                    attention_mask=self._torch.ones_like(token_ids),
                )
            total += found.shape[1] - len(prompt)
        return total
