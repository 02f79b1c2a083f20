"""OpenAI's Responses, over HTTP and over WebSockets."""
