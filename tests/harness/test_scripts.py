"""Scripts of tests run and end as an interpreter's own."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.harness.scripts import Script

WHOLE = """
import atexit, multiprocessing, os, sys, threading, warnings
import beside

class Last:
    def __del__(self):
        print("taken down", flush=True)

last = Last()
assert __name__ == "__main__" and sys.modules["__main__"].last is last
assert threading.active_count() == 1 and len(os.listdir("/proc/self/task")) == 1
assert multiprocessing.parent_process() is None
assert multiprocessing.current_process().name == "MainProcess"
assert multiprocessing.get_start_method() == multiprocessing.get_all_start_methods()[0]
child = multiprocessing.Process(target=print, args=("child",))
child.start()
child.join()
assert "UNSET" not in os.environ
print(beside.NAME, sys.argv[1:], os.environ["A"], os.path.basename(os.getcwd()))
atexit.register(print, "handler")
threading.Thread(target=lambda: (threading.main_thread().join(), print("thread"))).start()
try:
    warnings.warn("one")
except UserWarning:
    print("strict")
"""


def test_a_script_runs_and_ends_as_an_interpreter_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UNSET", "")
    path, log, folder = tmp_path / "train.py", tmp_path / "log", tmp_path / "folder"
    path.write_text(WHOLE)
    (tmp_path / "beside.py").write_text("NAME = 'beside'")
    folder.mkdir()
    env = {"A": "b", "UNSET": None}
    script = Script(path, "--steps", "3", log=log, env=env, folder=folder, strict=True)
    monkeypatch.undo()
    assert script.wait(60) == 0, log.read_text()
    lines = log.read_text().splitlines()
    assert sorted(lines[:2]) == ["beside ['--steps', '3'] b folder", "child"]
    assert lines[2:6] == ["strict", "thread", "handler", "taken down"]


ENDS = {
    "import sys; sys.exit(3)": (3, ""),
    "import sys; sys.exit('no data')": (1, "no data\n"),
    "def f():\n    raise KeyError('a')\nf()": (1, "KeyError: 'a'\n"),
    "import os, signal; os.kill(os.getpid(), signal.SIGKILL)": (-signal.SIGKILL, ""),
}


@pytest.mark.parametrize(("text", "code", "said"), [(t, *found) for t, found in ENDS.items()])
def test_its_code_is_that_of_its_end(text: str, code: int, said: str, tmp_path: Path) -> None:
    path, log, errors = (tmp_path / name for name in ("train.py", "log", "errors"))
    path.write_text(text)
    assert Script(path, log=log, errors=errors).wait(60) == code
    assert said in errors.read_text()
    if code == 1 and "Error" in said:
        assert errors.read_text().startswith("Traceback")
        assert "scripts.py" not in errors.read_text()


def test_one_that_takes_too_long_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("import time; time.sleep(100)")
    script = Script(path, log=tmp_path / "log")
    assert script.poll() is None
    with pytest.raises(TimeoutError, match=r"has not ended within 0\.1 s"):
        script.wait(0.1)
    assert script.poll() == -signal.SIGKILL
    with pytest.raises(ProcessLookupError):
        os.kill(script.pid, 0)
