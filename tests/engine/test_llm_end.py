"""LLM: loading that ends early, and what ends, is forgotten or goes with its program."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from pathlib import Path

import pytest
from engine.llm_support import llm_threads, make_llm
from engine.support import greedy, make_runner
from tiny import save_tiny_checkpoint

from streamkv import LLM
from streamkv.errors import ConfigError, ModelLoadError


def test_what_can_not_be_loaded_is_said_and_leaves_nothing():
    runner = make_runner(load_error=ModelLoadError("no weights"))
    with pytest.raises(ModelLoadError, match="no weights"):
        make_llm(runner)
    with pytest.raises(ConfigError, match="max_num_seqs"):
        make_llm(make_runner(), max_num_seqs=0)
    assert llm_threads() == []


def test_what_kept_a_model_from_loading_is_told_without_the_threads_calls(tmp_path):
    with pytest.raises(ModelLoadError, match="does not exist") as error:
        LLM(str(tmp_path / "nowhere"))
    calls = [entry.name for entry in error.traceback]
    assert calls[1:] == ["__init__", "_load", "__init__"] and error.value.__cause__ is None


def test_an_interrupt_while_loading_ends_it():
    class Interrupt(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            os.kill(os.getpid(), signal.SIGINT)
            return True

    with pytest.raises(KeyboardInterrupt):
        make_llm(make_runner(load_gate=Interrupt()))
    assert llm_threads() == []


def test_who_forgets_an_llm_frees_it():
    runners = [make_runner(), make_runner()]
    first, second = map(make_llm, runners)
    engine = weakref.ref(first._background.engine)
    for llm in (first, second):
        llm.generate("user", greedy(max_tokens=3), use_tqdm=False)
    del first, llm
    assert runners[0].closed and not runners[1].closed
    assert len(llm_threads()) == 2  # the second's
    gc.collect()
    assert engine() is None
    second.circle = second
    del second
    gc.collect()
    assert runners[1].closed and llm_threads() == []


def run_program(program: str, *arguments: str) -> str:
    tests = Path(__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent)])},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FORGETFUL = """
import sys, threading
from engine.support import greedy, make_engine, make_runner
from streamkv import LLM
from streamkv.engine import threads
threads.EXIT_CHECK_S = 1000.0  # it must not be what ends the program
runner = make_runner()
close = runner.close
runner.close = lambda: (close(), print("closed", flush=True))
llm = LLM.from_engine(lambda: make_engine(runner))
def use():
    (output,) = llm.generate([[1]], greedy(max_tokens=3), use_tqdm=False)
    print(len(output.outputs[0].token_ids), flush=True)
"""


def test_a_program_that_forgets_its_llm_ends_at_once_and_frees_it():
    assert run_program(FORGETFUL + "use()") == "3\nclosed\n"


def test_an_llm_serves_on_in_a_thread_that_outlives_the_main_script():
    assert run_program(FORGETFUL + """
def later():
    threading.main_thread().join()
    use()
    llm.close()
threading.Thread(target=later).start()
""") == "3\nclosed\n"  # fmt: skip


def test_a_fork_is_told_that_the_llm_is_in_another_process():
    assert run_program(FORGETFUL + """
import os
from streamkv.errors import EngineDeadError
if child := os.fork():
    os.waitpid(child, 0)
    use()
else:
    try:
        use()
    except EngineDeadError as error:
        print(error, flush=True)
    llm.close()
""") == "the LLM was loaded in another process: load it after the fork\n3\nclosed\n"  # fmt: skip


def test_llms_that_come_and_go_leave_no_thread_and_no_memory(tmp_path):
    save_tiny_checkpoint(tmp_path, hidden_size=512, intermediate_size=2048, num_hidden_layers=4)
    program = """
import sys, threading
from streamkv import LLM
def rss_kib():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))
def cycle():
    llm = LLM(sys.argv[1], num_gpu_blocks_override=64)  # weights of 33 MiB
    llm.generate([[1, 2, 3]] * 20, use_tqdm=False)
for _ in range(2):
    cycle()
before = rss_kib(), threading.active_count()
for _ in range(4):
    cycle()
print(rss_kib() - before[0], threading.active_count() - before[1])
"""
    grown_kib, grown_threads = map(int, run_program(program, str(tmp_path)).split())
    assert grown_kib < 16 * 1024 and grown_threads == 0
