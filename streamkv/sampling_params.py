"""How to generate, where scripts for vLLM import it from."""

from .engine.beam_output import BeamSearchParams
from .protocol import SamplingParams
from .structured import GuidedDecodingParams
from .structured import StructuredOutputs as StructuredOutputsParams

__all__ = [
    "BeamSearchParams",
    "GuidedDecodingParams",
    "SamplingParams",
    "StructuredOutputsParams",
]
