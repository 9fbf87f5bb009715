"""Sandbox for generated Python: a separate process with limits. It stops accidents, not an attacker."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS, MEGABYTES = 30, 1024  # a reference solution of MBPP takes 11 s on a slow core

# Runs in the child before the code: sets limits, then a hook that refuses sockets, processes and files elsewhere.
GUARD = """
import os, resource, sys
def _limit(what, most):
    hard = resource.getrlimit(what)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(what, (most, most))
_limit(resource.RLIMIT_CPU, {seconds})
_limit(resource.RLIMIT_AS, {megabytes} << 20)
_limit(resource.RLIMIT_FSIZE, 16 << 20)
_limit(resource.RLIMIT_NOFILE, 64)
_limit(resource.RLIMIT_CORE, 0)
def _guard(event, arguments, here=os.getcwd(), writing=os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC):
    refused = ("socket.", "subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill",
               "os.chmod", "os.chown", "os.link", "os.symlink", "os.remove", "os.rename", "os.rmdir", "os.truncate",
               "shutil.", "ctypes.", "signal.")
    if event.startswith(refused):
        raise PermissionError(event + " is refused in the sandbox")
    if event == "open" and isinstance(arguments[2], int) and arguments[2] & writing:
        path = os.path.realpath(os.fsdecode(arguments[0])) if isinstance(arguments[0], (str, bytes)) else ""
        if not path.startswith(here + os.sep):
            raise PermissionError("writing outside the sandbox is refused")
os.environ.clear()
sys.addaudithook(_guard)
del _limit, _guard
"""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Whether the program ran to its end without an error; if not, the last line of its output."""

    passed: bool
    reason: str


@cache
def without_network() -> tuple[str, ...]:
    """The command prefix that starts a process without a network; empty if the kernel does not allow it."""
    prefix = ("unshare", "--net", "--map-root-user")
    if shutil.which("unshare") is None:
        return ()
    trial = subprocess.run([*prefix, "true"], capture_output=True)
    return prefix if trial.returncode == 0 else ()


def execute(code: str, *, seconds: int = SECONDS, megabytes: int = MEGABYTES) -> Outcome:
    """Run the code in an empty folder: `seconds` of processor and of wall time, `megabytes` of address space.

    No network (a separate namespace if the kernel allows it, and no sockets), no other processes, no files written
    outside the folder, an empty environment, no site packages. The code passes if it reaches its end: code that calls
    `exit()` early does not pass.
    """
    if not hasattr(os, "setsid"):
        raise OSError("generated code runs on Linux and macOS only: its limits need their kernels")
    with tempfile.TemporaryDirectory() as folder:
        script, done = Path(folder, "program.py"), os.urandom(16).hex()
        program = f"{GUARD.format(seconds=seconds, megabytes=megabytes)}\nexec(compile({code!r}, 'program', 'exec'), "
        script.write_text(program + f"{{'__name__': '__main__'}})\nprint({done!r})\n", encoding="utf-8")
        command = [*without_network(), sys.executable, "-I", "-S", "-B", str(script)]
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            start_new_session=True, env={},
        )  # fmt: skip
        try:
            output = process.communicate(timeout=seconds + 1)[0].decode(errors="replace").strip().splitlines()
        except subprocess.TimeoutExpired:
            return Outcome(False, f"timed out after {seconds} s")
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    if process.returncode == 0 and output and output[-1] == done:
        return Outcome(True, "")
    if process.returncode == -signal.SIGKILL:  # sent by the kernel at the limit of processor time
        return Outcome(False, f"timed out after {seconds} s")
    return Outcome(
        False, output[-1][:200] if output and output[-1] != done else f"ended with code {process.returncode}"
    )
