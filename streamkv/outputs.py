"""What `LLM` returns, where scripts for vLLM import it from."""

from .engine.request_output import CompletionOutput, RequestOutput

__all__ = ["CompletionOutput", "RequestOutput"]
