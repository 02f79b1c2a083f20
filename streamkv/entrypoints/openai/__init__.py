"""Where scripts written for vLLM expect the server."""
