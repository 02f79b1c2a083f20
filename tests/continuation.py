"""What `transformers` in float32 continues a prompt with, greedily: the oracle of whole answers."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any


@functools.cache
def _load(folder: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return AutoTokenizer.from_pretrained(folder), model


def continued_ids(folder: Path, prompt: str | list[dict[str, str]], num_tokens: int) -> list[int]:
    """The next tokens after a text, or of the answer to a conversation."""
    tokenizer, model = _load(folder)
    if not isinstance(prompt, str):
        prompt = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=num_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()


def continued_text(folder: Path, prompt: str | list[dict[str, str]], num_tokens: int) -> str:
    tokenizer, _ = _load(folder)
    return tokenizer.decode(continued_ids(folder, prompt, num_tokens), skip_special_tokens=True)
