"""What goes wrong with a server, as one line that says which server and what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from .stream import RequestFailed


@contextmanager
def named(url: str) -> Iterator[None]:
    """What goes wrong with a server, as one RequestFailed that says which."""
    try:
        yield
    except Exception as error:
        errors = leaves(error)
        if not all(isinstance(one, (RequestFailed, OSError, EOFError)) for one in errors):
            raise
        first, more = errors[0], f" ({len(errors)} requests failed)" if errors[1:] else ""
        if isinstance(first, ConnectionResetError | BrokenPipeError | EOFError):
            reason = f"the connection ended early: {first}"
        elif isinstance(first, OSError):
            reason = f"can't connect: {first}; start a server there first, or name another"
        else:
            reason = str(first)
        raise RequestFailed(f"{url}: {reason}{more}") from None


def leaves(error: BaseException) -> list[BaseException]:
    """The exceptions inside a group, however deep; or the one."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    return [leaf for one in error.exceptions for leaf in leaves(one)]
