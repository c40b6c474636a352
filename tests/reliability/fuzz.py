"""Mutated input of every kind, for as long as one likes: nothing but named errors may come of it.

    python tests/reliability/fuzz.py --seconds 600

Payloads go through both decoders, the compiled one under address and undefined-behaviour sanitizers where the
compiler has them: four fifths with checksums that fit, so that the checks behind them are reached. What one
decoder takes the other must take, with the same result; an output that was refused must be untouched. State
files, configurations and launch scripts must give what was written, or an error of the plugin's own. Ends
with a line of JSON; exits with 1 at the first violation, and leaves its input in ``fuzz-failure``.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: Share of the time that each part gets; what it does not need is left to those behind it.
SHARES = {"payloads": 0.5, "states": 0.2, "configurations": 0.15, "scripts": 0.15}
COUNTS = {"payloads": 1_000_000, "states": 100_000, "configurations": 100_000, "scripts": 100_000}
_SANITIZED = "DCT_FUZZ_SANITIZED"
_FAILURE = Path("fuzz-failure")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="time limit of all parts together")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the numbers of inputs")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=SHARES, help="one part alone")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"seed": arguments.seed}
    parts, until = [arguments.only] if arguments.only else list(SHARES), time.monotonic() + arguments.seconds
    for at, part in enumerate(parts):
        seconds = (until - time.monotonic()) * SHARES[part] / sum(SHARES[other] for other in parts[at:])
        if part == "payloads" and _SANITIZED not in os.environ:
            report |= _under_sanitizers(seconds, arguments.scale, arguments.seed)
            continue
        if part == "payloads":
            report["sanitizers"] = os.environ[_SANITIZED] or "none"
        inputs = PARTS[part](random.Random(arguments.seed))
        outcomes = Counter([next(inputs)])
        began = time.monotonic()  # what the first one waits for (imports, a compiler) is no input's time
        for outcome in inputs:
            outcomes[outcome] += 1
            if outcomes.total() >= arguments.scale * COUNTS[part] or time.monotonic() > began + seconds:
                break
        spent = round(time.monotonic() - began, 1)
        report[part] = {"count": outcomes.total(), **outcomes, "seconds": spent}
    print(json.dumps(report), flush=True)
    return 0


def _under_sanitizers(seconds: float, scale: float, seed: int) -> dict[str, Any]:
    """The report of the payloads, from a process with the sanitizers' libraries in front of everything and
    kernels compiled for them; they would only slow down what is written in Python.
    """
    libraries = []
    for name in ("libasan.so", "libubsan.so"):
        try:
            found = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True)
        except OSError:
            break
        if os.path.isabs(found.stdout.strip()):
            libraries.append(found.stdout.strip())
    with tempfile.TemporaryDirectory() as cache:
        variables = {**os.environ, _SANITIZED: "", "XDG_CACHE_HOME": cache, "DCT_KERNELS": "cpu"}
        if len(libraries) == 2:
            variables |= {
                _SANITIZED: "address,undefined",
                "LD_PRELOAD": " ".join(libraries),
                "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
                "UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1",
            }
        limits = ["--seconds", str(seconds), "--scale", str(scale), "--seed", str(seed)]
        command = [sys.executable, __file__, "--only", "payloads", *limits]
        done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def violated(what: str, content: bytes) -> None:
    """Stop, and keep the input that did it."""
    _FAILURE.write_bytes(content)
    raise SystemExit(f"{what}; the input is in {_FAILURE}")


def mutated(content: bytes, generator: random.Random) -> bytes:
    """A few bits, bytes, pieces or the end changed."""
    data = bytearray(content)
    for _ in range(generator.choice((1, 1, 1, 2, 5))):
        kind, at = generator.randrange(6), generator.randrange(len(data)) if data else 0
        if not data:
            return b""
        if kind == 0:
            data[at] ^= 1 << generator.randrange(8)
        elif kind == 1:
            data[at] = generator.choice((0, 1, 127, 128, 255))
        elif kind == 2:
            data[at : at + 8] = generator.randbytes(8)
        elif kind == 3:
            del data[at:]
        elif kind == 4:
            data[at:at] = data[at : at + generator.randrange(1, 64)]
        else:
            del data[at : at + generator.randrange(1, 16)]
    return bytes(data)


# -- payloads ---


def payloads(generator: random.Random) -> Iterator[str]:
    """``taken`` or ``refused`` for every payload."""
    import torch

    from dct_plugin.kernels import build

    torch.set_num_threads(1)
    if os.environ[_SANITIZED]:
        build.PREBUILT = Path("none.so")
        build.FLAGS += [f"-fsanitize={os.environ[_SANITIZED]}", "-fno-sanitize-recover=all", "-O1", "-g"]
    from dct_plugin.errors import PayloadError
    from dct_plugin.kernels import get_backend

    compiled, reference = get_backend("cpu", "cpu"), get_backend("cpu", "reference")
    originals = list(_payloads())

    def decoded(backend: Any, data: bytes, out: torch.Tensor, who: str = "") -> str:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
        try:
            backend.decode_add(tensor, out)
        except PayloadError:
            return "refused"
        except Exception as error:
            violated(f"{who}{type(error).__name__}: {error}", data)
        return "taken"

    untouched = torch.full((max(numel for _, numel in originals),), 7.25)
    number = 0
    while True:
        number += 1
        content, numel = generator.choice(originals)
        data = mutated(content, generator)
        if generator.random() < 0.8:
            data = resealed(data)
        out = untouched[:numel].clone()
        outcome = decoded(compiled, data, out)
        if outcome == "refused" and not torch.equal(out, untouched[:numel]):
            violated("a refused payload changed the output", data)
        if number % 25 == 0 or outcome == "taken":
            other = untouched[:numel].clone()
            second = decoded(reference, data, other, "reference: ")
            if second != outcome or not torch.equal(out.view(torch.int32), other.view(torch.int32)):
                violated(f"the decoders differ: compiled {outcome}, reference {second}", data)
        yield outcome


def _payloads() -> Iterator[tuple[bytes, int]]:
    """Payloads of every kind of positions and values, and their entries."""
    import torch

    from dct_plugin import Compressor
    from dct_plugin.codecs.payload import payload_bound
    from dct_plugin.codecs.values import ValueDtype
    from dct_plugin.kernels import Job, get_backend

    kernels = get_backend(torch.device("cpu"))
    for numel in (1, 5, 257, 3000, 70_000):
        for dtype in ValueDtype:
            for sparsity in (0.0, 0.5, 0.9, 0.99):
                values = torch.randn(numel)
                wanted = max(1, round((1 - sparsity) * numel))
                tau = kernels.exact_threshold(values, None, wanted) if sparsity else 0.0
                out = torch.empty(payload_bound(numel, wanted, dtype), dtype=torch.uint8)
                stats = kernels.compress(Job(values, None, tau, out, capacity=wanted, value_dtype=dtype))
                if stats.nbytes < 4000:
                    yield out[: stats.nbytes].numpy().tobytes(), numel
    poisoned = torch.randn(100)
    poisoned[3] = float("nan")
    yield Compressor(sparsity=0.5).compress(poisoned).to_bytes(), 100


def resealed(data: bytes) -> bytes:
    """With checksums that fit, as far as there is a header."""
    import numpy as np

    from dct_plugin.codecs.payload import HEADER_NBYTES

    if len(data) < HEADER_NBYTES:
        return data
    body = data[HEADER_NBYTES:]
    words = np.frombuffer(data[:16] + body + bytes(-len(body) % 4), dtype="<u4").astype(np.uint64)
    positions = np.arange(1, len(words) + 1, dtype=np.uint64)
    checks = np.array([words.sum(), (words * positions).sum()], dtype=np.uint64) & np.uint64(0xFFFFFFFF)
    return data[:16] + checks.astype("<u4").tobytes() + body


# -- state files ---


def states(generator: random.Random) -> Iterator[str]:
    """``refused``, ``as written`` (the change was where nothing is read), for every file."""
    import torch

    from dct_plugin import Compressor, checkpoint
    from dct_plugin.errors import DCTError

    def written_in(path: Path) -> Any:
        content = checkpoint.read(path)
        streams = content["state"]["streams"].values()
        return [stream.pop("residual").tolist() for stream in streams], content

    streams = {}
    for name, numel in (("a", 300), ("b.weight", 40)):
        stream = Compressor(sparsity=0.9, name=name)
        stream.compress(torch.randn(numel))
        streams[name] = stream.state_dict()
    warnings.filterwarnings("ignore", message="Detected pickle protocol")  # about odd versions of pickle
    with tempfile.TemporaryDirectory() as folder:
        path, state = checkpoint.StateFiles(0, 0).file(folder), {**checkpoint.FRESH, "streams": streams}
        checkpoint.write(path, checkpoint.StateFiles(0, 1).content(state))
        whole, expected = path.read_bytes(), written_in(path)
        while True:
            data = mutated(whole, generator)
            path.write_bytes(data)
            try:
                checkpoint.StateFiles(0, 1, sizes={"a": 300, "b.weight": 40}).read(folder)
                if written_in(path) != expected:
                    violated("a changed state was loaded", data)
                yield "as written"
            except DCTError as error:
                if str(path) not in str(error):
                    violated(f"an error without the file's name: {error}", data)
                yield "refused"
            except Exception as error:
                violated(f"{type(error).__name__}: {error}", data)


# -- configurations ---


def configurations(generator: random.Random) -> Iterator[str]:
    """``valid`` or ``refused`` for every configuration."""
    from dct_plugin.config import DCTConfig, options
    from dct_plugin.errors import ConfigError

    paths = [option.path.split(".")[1:] for option in options(DCTConfig())]
    values: list[Callable[[], Any]] = [
        lambda: generator.choice([None, True, False, "", "auto", "bf16", "none", "\0", "x" * 200, [], {}]),
        lambda: generator.choice([0, 1, -1, 2**31, 2**63, 10**40, generator.randrange(100)]),
        lambda: generator.choice([0.5, 0.99, 1.0, -0.0, 1e-320, 1e308, generator.random()]),
        lambda: [generator.random() * 3 for _ in range(generator.randrange(5))],
        lambda: nested(generator.randrange(60)),
    ]

    def nested(depth: int) -> Any:
        found: Any = generator.choice([1, "a", None])
        for _ in range(depth):
            found = [found] if generator.random() < 0.5 else {"a": found}
        return found

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "a.json"
        while True:
            section: dict[str, Any] = {}
            for _ in range(generator.randrange(1, 6)):
                *parts, key = generator.choice(paths)
                place = section
                for part in parts:
                    place = place.setdefault(part, {}) if isinstance(place.get(part, {}), dict) else place
                place[key if generator.random() < 0.95 else key[::-1]] = generator.choice(values)()
            text = json.dumps({"dct": section}).encode()
            if generator.random() < 0.3:
                text = mutated(text, generator)
            file.write_bytes(text)
            try:
                made = DCTConfig.from_file(file)
                if DCTConfig.parse(json.loads(made.model_dump_json())) != made:
                    violated("a configuration does not survive being written and read", text)
                yield "valid"
            except ConfigError:
                yield "refused"
            except Exception as error:
                violated(f"{type(error).__name__}: {error}", text)


# -- launch scripts ---


def scripts(generator: random.Random) -> Iterator[str]:
    """``patched`` (and taken back exactly) or ``refused`` for every script; none is ever executed."""
    from dct_plugin.integrations.megatron.patch import LaunchError, patch, revert

    folder = Path(__file__).parents[1] / "megatron" / "launch_corpus"
    originals = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    pieces = [b"'", b'"', b"$(", b")", b"`", b"\\\n", b"<<EOF\n", b"${", b"}", b";", b"&&", b"|", b"((", b"#"]
    while True:
        data = generator.choice(originals)
        if generator.random() < 0.5:
            data = mutated(data, generator)
        else:
            for _ in range(generator.randrange(1, 4)):
                at = generator.randrange(len(data) + 1)
                data = data[:at] + generator.choice(pieces) + data[at:]
        text = data.decode("utf-8", "surrogateescape")
        try:
            after, _ = patch(text)
            if revert(after) != revert(text):
                violated("a script that was patched and taken back is another", data)
            yield "patched"
        except LaunchError:
            yield "refused"
        except Exception as error:
            violated(f"{type(error).__name__}: {error}", data)


PARTS: dict[str, Callable[[random.Random], Iterator[str]]] = {
    "payloads": payloads,
    "states": states,
    "configurations": configurations,
    "scripts": scripts,
}

if __name__ == "__main__":
    sys.exit(main())
