"""How to generate, where scripts for vLLM import it from."""

from .engine.beam_output import BeamSearchParams
from .protocol import SamplingParams

__all__ = ["BeamSearchParams", "SamplingParams"]
