"""`transformers.generate`, one prompt at a time, in this process: what a script without a server
does. Needs torch and transformers, which are imported only when asked for."""

from __future__ import annotations

import time
from pathlib import Path

from .workload import Workload


class SequentialTransformers:
    """A checkpoint in Hugging Face format, in bfloat16."""

    def __init__(self, model: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
        self._model.generation_config.eos_token_id = None
        self._torch = torch

    def run(
        self, workload: Workload, num_requests: int, seed: str, vocab_size: int
    ) -> dict[str, float]:
        """One round."""
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
