"""`SamplingParams`, where scripts for vLLM import it from."""

from .protocol import SamplingParams

__all__ = ["SamplingParams"]
