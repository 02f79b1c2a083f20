"""The engine's own threads: how the program and they find out about each other's end.

Invariant: a thread made here keeps the interpreter from ending only while somebody may still need
it: a program that forgets to close its engine ends all the same.
"""

from __future__ import annotations

import asyncio
import threading

# How often an idle thread looks whether it was forgotten. A program that forgets to close its
# engine then still ends, while daemon threads would be killed inside native code.
EXIT_CHECK_S = 2.0


class EngineThread(threading.Thread):
    """To tell the threads made here from those of the program."""


def program_has_threads() -> bool:
    """Whether any is left, besides the main one and those made here, that the interpreter waits
    for before it ends."""
    return any(
        not (one.daemon or one is threading.main_thread() or isinstance(one, EngineThread))
        for one in threading.enumerate()
    )


def is_abandoned(loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the event loop will never ask for anything again.

    One that stands still may be run again by the main thread. Once that has ended, one that runs
    counts, unless only daemon threads are left besides ours: the interpreter waits for us.
    """
    if loop.is_closed():
        return True
    if threading.main_thread().is_alive():
        return False
    return not loop.is_running() or not program_has_threads()
