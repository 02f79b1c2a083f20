"""Black-box load tests over HTTP and WebSocket; nothing of streamkv is imported, so any server
that speaks OpenAI's API will do."""
