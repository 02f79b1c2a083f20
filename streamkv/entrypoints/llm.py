"""`LLM`, where scripts for vLLM import it from."""

from ..engine.llm import LLM

__all__ = ["LLM"]
