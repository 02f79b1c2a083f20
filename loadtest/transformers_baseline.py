"""`transformers.generate`, one prompt at a time, in this process: what a script without a server
does. Needs torch and transformers, which are imported only when asked for."""

from __future__ import annotations

import time
from pathlib import Path

from .stream import RequestFailed
from .workload import Workload


class SequentialTransformers:
    """A checkpoint in Hugging Face format, in bfloat16. RequestFailed if it can't be one."""

    def __init__(self, model: Path) -> None:
        try:
            import torch
            from transformers import AutoModelForCausalLM

            self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        except (ImportError, OSError, ValueError) as error:
            reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise RequestFailed(f"--transformers {model}: {reason}") from None
        self._model.generation_config.eos_token_id = None
        self._torch = torch

    def run(
        self, workload: Workload, num_requests: int, seed: str, vocab_size: int
    ) -> dict[str, float]:
        """One round."""
        most = self._model.config.vocab_size
        if vocab_size > most:
            raise RequestFailed(f"--vocab-size: expected at most the model's {most}")
        num_tokens, started_s = 0, time.monotonic()
        for prompt in workload.token_prompts(num_requests, seed, vocab_size):
            ids = self._torch.tensor([prompt])
            with self._torch.inference_mode():
                output = self._model.generate(
                    ids,
                    attention_mask=self._torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=workload.output_len,
                    max_new_tokens=workload.output_len,
                    pad_token_id=0,
                )
            num_tokens += output.shape[1] - ids.shape[1]
        return {"tokens_per_s": num_tokens / (time.monotonic() - started_s)}
