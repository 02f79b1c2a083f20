"""The official clients of a real server."""

from __future__ import annotations

import httpx
import openai
from clients.real_server import DEADLINE_S, RealServer


def sync_client(real: RealServer) -> openai.OpenAI:
    http = httpx.Client(verify=False, timeout=DEADLINE_S)
    return openai.OpenAI(base_url=real.base_url, api_key="none", max_retries=0, http_client=http)


def async_client(real: RealServer) -> openai.AsyncOpenAI:
    http = httpx.AsyncClient(verify=False, timeout=DEADLINE_S)
    return openai.AsyncOpenAI(
        base_url=real.base_url, api_key="none", max_retries=0, http_client=http
    )
