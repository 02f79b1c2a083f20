"""Every error streamkv raises on purpose.

    StreamkvError
    ├── ConfigError              a flag, environment variable or config value makes no sense
    ├── ModelLoadError           a checkpoint is missing, broken or not supported
    ├── InvalidRequestError      the request can't be honoured as sent              400
    │   ├── ContextLengthError   prompt (plus max_tokens) exceed the context        400
    │   └── CapacityError        could never fit in the KV pool, even alone         400
    ├── PayloadTooLargeError     the body exceeds the server's limit                413
    ├── AuthenticationError      missing or wrong API key                           401
    ├── ForbiddenError           foreign Origin, or a Host that isn't this server   403
    ├── NotFoundError            no such route or object                            404
    │   ├── UnknownModelError    no model of that name is served                    404
    │   └── GoneError            it was here, and is dropped                        410
    ├── OverloadedError          the waiting queue is full                          429
    ├── EngineNotReadyError      the model is still loading                         503
    ├── EngineDeadError          the engine has stopped and serves nobody           503
    └── GenerationError          this request failed on the device                  500

ConfigError and InvalidRequestError are ValueErrors too. `except ValueError` around code that may
raise them comes after they were let through.

Messages say what was expected, what came, and what to do. `param` names the request field at
fault as a client would write it (`messages[2].role`). The server maps the tree to HTTP statuses
and OpenAI error bodies in one place.
"""

from __future__ import annotations

FREE_MEMORY = "free some, or use a smaller model or smaller limits"  # when it runs out


class StreamkvError(Exception):
    """Base of the tree; `str(error)` is written to be shown to the user."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class ConfigError(StreamkvError, ValueError):
    """A flag, environment variable or config value makes no sense."""


class ModelLoadError(StreamkvError):
    """A checkpoint is missing, broken or not supported."""


class InvalidRequestError(StreamkvError, ValueError):
    """The request can't be honoured as sent."""


class ContextLengthError(InvalidRequestError):
    """The prompt, or the prompt plus the tokens asked for, exceeds the context length."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class CapacityError(InvalidRequestError):
    """The request could never fit in the KV pool, even with nothing else running."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="kv_capacity_exceeded")


class PayloadTooLargeError(StreamkvError):
    """The request body exceeds the server's limit."""


class AuthenticationError(StreamkvError):
    """The API key is missing or wrong."""


class ForbiddenError(StreamkvError):
    """The request came from a foreign Origin or for a Host that isn't this server."""


class NotFoundError(StreamkvError):
    """No such route or object."""


class UnknownModelError(NotFoundError):
    """No model of that name is served here."""

    def __init__(self, message: str) -> None:
        super().__init__(message, param="model", code="model_not_found")


class GoneError(NotFoundError):
    """What was asked for was here and is not kept any more."""


class OverloadedError(StreamkvError):
    """The waiting queue is full; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: int) -> None:
        super().__init__(message, code="overloaded")
        self.retry_after_s = retry_after_s


class EngineNotReadyError(StreamkvError):
    """The model is still loading."""


class EngineDeadError(StreamkvError):
    """The engine has stopped and serves nobody."""


class GenerationError(StreamkvError):
    """This request failed on the device; others go on."""


def one_line(words: object, max_chars: int = 200) -> str:
    """Another's words for a message of ours: printable, on one line, not too many."""
    text = " ".join(str(words).split())
    text = "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)
    return text if len(text) <= max_chars else f"{text[: max_chars - 1]}\N{HORIZONTAL ELLIPSIS}"
