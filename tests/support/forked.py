"""Stands in for the interpreter: programs start as forks of a process that has imported their packages.

``sys.executable`` becomes a small program. It asks for a fork with its arguments, environment, working
folder, files and network namespace, passes signals on, and ends as the fork ends. The fork dies with it.
Tests of what happens while packages are imported need interpreters of their own.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import marshal
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import types
import warnings
from collections.abc import Iterator
from functools import cache
from multiprocessing import connection, resource_tracker
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from dct_plugin.integrations.autoload import autoload
from support import processes

#: Names the stand-in to programs, which start others.
_VARIABLE = "DCT_TEST_INTERPRETER"

#: The stand-in imports little: it starts for every rank.
_CLIENT = """#!{python} -IS
import _socket, marshal, os, signal, sys
server = _socket.socket(_socket.AF_UNIX, _socket.SOCK_STREAM)
files = []
for file in map(int, os.listdir("/proc/self/fd")):
    try:
        if os.get_inheritable(file):
            files.append(file)
    except OSError:
        pass
server.connect({address!r})
request = marshal.dumps((os.getpid(), sys.argv, dict(os.environ), os.getcwd(), files))
rights = b"".join(file.to_bytes(4, sys.byteorder) for file in files)
server.sendmsg([len(request).to_bytes(4, "big")], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, rights)])
while request:
    request = request[server.send(request):]
fork = int.from_bytes(server.recv(4), "big")
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
    signal.signal(number, lambda number, _: os.kill(fork, number))
code = server.recv(1)
if not code:
    os.kill(os.getpid(), signal.SIGKILL)
os._exit(code[0])
"""


@contextlib.contextmanager
def forked_interpreters() -> Iterator[None]:
    """Meanwhile, whoever starts ``sys.executable`` gets forks.

    With a GPU it is left as it is, see :func:`support.processes.context`.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv(_VARIABLE, _stand_in())
            patch.setattr(sys, "executable", _stand_in())
        yield


@contextlib.contextmanager
def forked_commands(*names: str) -> Iterator[None]:
    """Meanwhile, whoever starts ``sys.executable`` or one of these commands gets forks."""
    installed = Path(sys.prefix) / "bin"
    with forked_interpreters(), pytest.MonkeyPatch.context() as patch:
        folder = installed if torch.cuda.is_available() else Path(_stand_in()).parent
        for name in () if folder == installed else names:
            _, _, program = (installed / name).read_text().partition("\n")
            (folder / name).write_text(f"#!{_stand_in()}\n{program}")
            (folder / name).chmod(0o700)
        patch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield


@contextlib.contextmanager
def forked_ranks() -> Iterator[None]:
    """Meanwhile, torchrun's ranks are forks; torchrun and whoever starts it are not, so that ranks are seen
    and killed as its children.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not torch.cuda.is_available():
            patch.setenv("PYTHON_EXEC", _stand_in())
        yield


@cache
def _stand_in() -> str:
    """Start the process that forks, and return the path of the program that asks it."""
    folder = Path(tempfile.mkdtemp(prefix="forked-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    address, program = folder / "address", folder / "python"
    program.write_text(_CLIENT.format(python=sys.executable, address=str(address)))
    program.chmod(0o700)
    processes.context().Process(target=_serve, args=(str(address),), daemon=True).start()
    until = time.monotonic() + processes.PATIENCE
    while not address.exists():
        assert time.monotonic() < until, "the process that forks did not start"
        time.sleep(0.01)
    return str(program)


def _serve(address: str) -> None:
    """Fork for everybody who asks, until the process that started this one ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    dynamic_rendezvous.get_method_name = _method_name
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address + ".bound")
        listener.listen(64)
        os.rename(address + ".bound", address)
        while parent.sentinel not in (ready := connection.wait([listener, parent.sentinel], timeout=1.0)):
            if ready:
                _fork(listener)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _method_name(depth: int = 2) -> str:
    """Return the name of a calling method, for the log of torchrun's rendezvous. torch looks up the source of
    all callers, which takes 2 s in a process that has imported the frameworks.
    """
    return sys._getframe(depth).f_code.co_name


def _fork(listener: socket.socket) -> None:
    client, _ = listener.accept()
    with client:
        if os.fork():
            return
        code = 1
        try:
            code = _serve_one(client)
        except BaseException:
            traceback.print_exc()
        finally:
            with contextlib.suppress(OSError):
                client.send(bytes([code]))
            os._exit(0)


def _serve_one(client: socket.socket) -> int:
    """Be the interpreter that the client stands in for; return its exit status."""
    length, received, *_ = socket.recv_fds(client, 4, 250)
    data = b""
    while len(data) < int.from_bytes(length, "big"):
        data += client.recv(1 << 16)
    process, arguments, variables, folder, files = marshal.loads(data)
    _enter_namespaces(process)
    _take_files(client, dict(zip(files, received, strict=True)))
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    client.send(os.getpid().to_bytes(4, "big"))
    threading.Thread(target=_die_with, args=(client,), daemon=True).start()
    os.environ.clear()
    os.environ.update(variables)
    os.chdir(folder)
    sys.executable = variables.get(_VARIABLE, sys.executable)
    autoload()  # as at the end of `import torch`, with the program's environment
    try:
        _run(arguments[1:])
        code: object = 0
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    if code is not None and not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return (code or 0) & 255


def _enter_namespaces(process: int) -> None:
    kinds = [kind for kind in ("user", "net") if _namespace(process, kind) != _namespace("self", kind)]
    opened = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in kinds]
    for each in opened:
        if ctypes.CDLL(None, use_errno=True).setns(each, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(each)


def _namespace(process: int | str, kind: str) -> str:
    return os.readlink(f"/proc/{process}/ns/{kind}")


def _take_files(client: socket.socket, received: dict[int, int]) -> None:
    """Give the client's files their numbers, and close all others."""
    resource_tracker._resource_tracker._fd = None  # type: ignore[attr-defined]
    above = max(received, default=2) + 1
    moved = {number: _moved(file, above) for number, file in received.items()}
    kept = _moved(client.detach(), above)
    for file in map(int, os.listdir("/proc/self/fd")):
        if file not in moved.values() and file != kept:
            with contextlib.suppress(OSError):  # the listing's own
                os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    client.__init__(fileno=kept)  # type: ignore[misc]
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    errors = {sys.stderr, sys.__stderr__}
    # Those of the server know whether its own files can be sought in.
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", 1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    for logger in (logging.getLogger(name) for name in list(logging.root.manager.loggerDict)):
        for handler in logger.handlers:
            if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler):
                handler.setStream(sys.stderr if handler.stream in errors else sys.stdout)


def _moved(file: int, above: int) -> int:
    import fcntl

    copy = fcntl.fcntl(file, fcntl.F_DUPFD_CLOEXEC, above)
    os.close(file)
    return copy


def _die_with(client: socket.socket) -> None:
    client.recv(1)
    os.kill(os.getpid(), signal.SIGKILL)


def _run(arguments: list[str]) -> None:
    """Run ``[-u] [-W ignore] -m MODULE | -c CODE | SCRIPT, ARGUMENTS ...``."""
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    warnings.resetwarnings()
    for kind in (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning):
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("ignore", ".*found in sys.modules", RuntimeWarning)
    while arguments[0] in ("-u", "-W"):
        if arguments.pop(0) == "-W":
            warnings.simplefilter(arguments.pop(0))  # type: ignore[arg-type]
        else:
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
    how, rest = arguments[0], arguments[1:]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    first = str(Path(how).parent) if how[0] != "-" else "" if how == "-c" else os.getcwd()
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = dict.fromkeys([first, *filter(None, path), *sys.path])
    if how == "-m":
        sys.argv = rest
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif how == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    else:
        sys.argv = arguments
        runpy.run_path(how, run_name="__main__")
