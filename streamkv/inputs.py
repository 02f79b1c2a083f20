"""Forms of prompts, where scripts for vLLM import them from."""

from .engine.llm_prompts import TextPrompt, TokensPrompt

__all__ = ["TextPrompt", "TokensPrompt"]
