"""Run everything that is worth running on a machine with a GPU, in three calls of at most nine minutes.

    python benchmarks/gpu_hour.py wheels --into .gpu-wheels   # before: what a machine without a network lacks
    python benchmarks/gpu_hour.py run --call ranks            # there; then --call tests, --call figures
    python benchmarks/gpu_hour.py run --steps self-check tests --minutes 9
    python benchmarks/gpu_hour.py run --list
    python benchmarks/gpu_hour.py run --dry-run   # anywhere: the same programs, small, without a GPU

A call leaves one archive, written anew after each step. The first call's preflight ends it if the machine
cannot show what the rest is for. One GPU never shows several devices in a job, NVLink and InfiniBand, or
communicators that run at the same time.

The machine needs Python 3.12, torch with CUDA, Triton, a C compiler and pytest. nccl from version 2.30 on
takes several ranks on one GPU. Its wheel has code for many generations of GPUs; ``wheels`` keeps one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import lzma
import os
import shutil
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "out" / "gpu-hour"
NCCL = "nvidia-nccl-cu13==2.30.3"
PLATFORMS = (
    "manylinux_2_28",
    "manylinux_2_27",
    "manylinux_2_18",
    "manylinux_2_17",
    "manylinux2014",
    "manylinux1",
)
#: Packages that a machine with torch may lack; their own needs are not fetched.
PACKAGES = (
    "pydantic==2.14.3",
    "pydantic-core==2.50.4",
    "typing-inspection==0.4.5",
    "annotated-types==0.8.0",
    "hjson==3.1.0",
    "typer==0.29.2",
    "megatron-core==0.16.1",
)
_LIBRARY = "libnccl.so.2.xz"
#: A fat binary begins with it, and an entry of it says in which generation's code it is.
_FAT_BINARY, _CUBIN = struct.pack("<I", 0xBA55ED50), 2


class Step(NamedTuple):
    """A command and the seconds it may take.

    Attributes:
        dry: The command of a dry run, if it is another one.
        required: A failure ends the call.
    """

    command: str
    limit: int
    environment: Mapping[str, str] = MappingProxyType({})
    dry: str = ""
    required: bool = False


#: What lets programs run without a GPU (``no_gpu.py``).
DRY = {"DCT_DRY_RUN": "1", "TRITON_INTERPRET": "1"}
#: What nccl writes about a collective that hangs.
_TRACED = {
    "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
    "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "{out}/nccl_trace_rank_",
}
#: Figures of plain torch would mean nothing.
_TRITON = {"DCT_KERNELS": "triton"}
_DRY_TESTS = "{python} -m pytest tests/gpu -q --tb=short -p no:cacheprovider -p no:xdist"
_TESTS = (
    "{python} -m pytest tests/gpu -q --tb=short -p no:cacheprovider --timeout 60 -n {cores} "
    "--junitxml {out}/tests.xml"
)
_SANITIZED = (
    "compute-sanitizer --tool {tool} --error-exitcode 1 {{python}} -m pytest tests/gpu/test_gpu_kernels.py "
    "-q -x -p no:cacheprovider -p no:xdist -k 'slots or thresholds or batch or bits'"
)
STEPS = {
    "preflight": Step(
        "nvidia-smi && {python} benchmarks/gpu_hour.py preflight", 60, dry="true", required=True
    ),
    "self-check": Step(
        "{python} -m pytest tests/gpu -q -p no:cacheprovider -k self_check --durations 3",
        120,
        dry="{python} -m pytest tests/kernels/test_self_check.py -q -p no:cacheprovider -p no:xdist",
        required=True,
    ),
    "ranks": Step("{python} benchmarks/gpu_ranks.py --out {out}/ranks.jsonl", 400, _TRACED),
    "tests": Step(_TESTS, 480, _TRACED, dry=_DRY_TESTS + " --junitxml {out}/tests.xml"),
    "steps": Step(
        "{python} benchmarks/gpu.py --json {out}/gpu.json --trace {out}/trace.json.gz", 200, _TRITON
    ),
    "one-tensor": Step("{python} benchmarks/gpu_kernels.py --json {out}/kernels.json", 90, _TRITON),
    **{
        tool: Step(
            _SANITIZED.format(tool=tool),
            120,
            {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"},
            dry=_DRY_TESTS + " -k slots",
        )
        for tool in ("memcheck", "initcheck")
    },
    # For longer loans; in no call.
    "quality": Step(
        "{python} benchmarks/studies/gpu_quality.py --steps 540 --results {out}/quality.jsonl",
        420,
        dry="{python} benchmarks/studies/gpu_quality.py --steps 5 --text dct_plugin/config "
        "--settings default --results {out}/quality.jsonl",
    ),
    "transformer-engine": Step(  # what is skipped needs Transformer Engine
        "{python} -m pytest tests/gpu/test_gpu_megatron.py -q -rs -p no:cacheprovider -k transformer_engine",
        180,
        dry=_DRY_TESTS + " -k transformer_engine",
    ),
    **{
        f"selection-{numel}": Step(
            f"{{python}} benchmarks/gpu.py --no-steps --numel {numel} --json {{out}}/gpu-{numel}.json",
            90,
            _TRITON,
        )
        for numel in (10**6, 10**7, 10**9)
    },
}
CALLS = {
    "ranks": ["preflight", "self-check", "ranks"],
    "tests": ["preflight", "tests"],
    "figures": ["preflight", "steps", "one-tensor", "memcheck", "initcheck"],
}


def run(names: list[str], wheels: Path | None, minutes: float, *, dry: bool = False, out: Path = OUT) -> int:
    """Run steps until the time is up, or small ones without a GPU; return the number of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="dct-gpu-hour-"))
    end, results, failed = time.monotonic() + 60 * minutes, {}, 0
    environment = _installed(wheels) if wheels else dict(os.environ)
    environment |= DRY if dry else {}
    for name in names:
        step, left = STEPS[name], end - time.monotonic()
        if left < 20:
            print(f"{name}: not begun, the time is up", flush=True)
            continue
        text = step.dry if dry and step.dry else step.command
        command = text.format(python=sys.executable, out=work, cores=max(1, min(8, os.cpu_count() or 2)))
        begin, log = time.monotonic(), work / f"{name}.log"
        variables = {key: value.format(out=work) for key, value in step.environment.items()}
        code = _run(command, log, environment | variables, left if dry else min(step.limit, left))
        seconds = time.monotonic() - begin
        failed += code != 0
        results[name] = {"command": command, "exit": code, "seconds": round(seconds, 1), "dry_run": dry}
        (work / "steps.json").write_text(json.dumps(results, indent=1) + "\n")
        _pack(work, out / f"gpu-hour-{names[-1]}.tar.gz")
        print(f"{name}: exit {code}, {seconds:.0f} s", flush=True)
        print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
        if code and step.required:
            print(f"{name} failed: nothing that follows would show what it is for", flush=True)
            break
    return failed


def _run(command: str, log: Path, variables: Mapping[str, str], limit: float) -> int:
    """Run a command, and interrupt it at its limit, so that pytest writes what it has; return its status."""
    with log.open("w") as file:
        process = subprocess.Popen(
            command,
            shell=True,
            cwd=ROOT,
            env=variables,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return -9


def _pack(work: Path, archive: Path) -> None:
    """Write all files of a folder into one archive, which is there in full or as before."""
    packed = archive.with_suffix(".new")
    with tarfile.open(packed, "w:gz") as tar:
        tar.add(work, arcname=archive.name.partition(".")[0])
    packed.replace(archive)


def preflight() -> list[str]:
    """Return what this machine lacks."""
    import torch

    sys.path.insert(0, str(ROOT))
    lacks = [] if torch.cuda.is_available() else ["a GPU that torch sees"]
    if not lacks and (version := torch.cuda.nccl.version()) < (2, 30):
        lacks.append(f"nccl 2.30, which takes several ranks on one GPU; found {version}")
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        lacks.append("a C compiler, which Triton needs when it runs")
    try:
        import triton

        print("torch", torch.__version__, "triton", triton.__version__)
    except ImportError as error:
        lacks.append(f"Triton: {error}")
    if os.environ.get("TORCH_DISTRIBUTED_USE_NCCL2", os.environ.get("TORCH_DIST_USE_NCCL2", "0")) != "0":
        lacks.append("a job without TORCH_DIST_USE_NCCL2: nccl2 refuses two ranks on one GPU")
    print("TORCH_DIST_USE_NCCL2", os.environ.get("TORCH_DIST_USE_NCCL2", "not set"))
    return lacks


def _installed(wheels: Path) -> dict[str, str]:
    """Install the wheels beside the machine's own packages; return the variables that use them."""
    site = Path(tempfile.gettempdir()) / "dct-gpu-hour"
    files = [str(path) for path in wheels.glob("*.whl")]
    options = ["--quiet", "--no-index", "--no-deps", "--no-compile", "--upgrade", "--target", str(site)]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, *files], check=True)
    found = dict(os.environ, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}:{site}", NCCL_MULTI_RANK_GPU_ENABLE="1")
    if (wheels / _LIBRARY).exists():
        library = site / "libnccl.so.2"
        with lzma.open(wheels / _LIBRARY) as source, library.open("wb") as target:
            shutil.copyfileobj(source, target)
        found["LD_PRELOAD"] = str(library)
    return found


def gather(into: Path, architecture: int) -> None:
    """Download the packages and nccl, for Python 3.12 on x86-64."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for package in (*PACKAGES, NCCL):
            platforms = [part for name in PLATFORMS for part in ("--platform", f"{name}_x86_64")]
            target = folder if package == NCCL else str(into)
            options = ["--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.12", *platforms]
            subprocess.run(
                [sys.executable, "-m", "pip", "download", *options, "-d", target, package], check=True
            )
        (wheel,) = Path(folder).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            data = bytearray(archive.read("nvidia/nccl/lib/libnccl.so.2"))
    keep_architecture(data, architecture)
    (into / _LIBRARY).write_bytes(lzma.compress(data, preset=6))
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--no-deps",
            "-w",
            str(into),
            "deepspeed==0.19.8",
        ],
        env={**os.environ, "DS_BUILD_OPS": "0"},
        check=False,  # only some steps need it
    )
    print(f"{into}: {sum(path.stat().st_size for path in into.iterdir()) / 2**20:.0f} MiB")


def keep_architecture(data: bytearray, architecture: int) -> None:
    """Write zeros over the code for other GPUs in a library's fat binaries, which compresses to a seventh."""
    at = data.find(_FAT_BINARY)
    while at >= 0:
        version, header, size = struct.unpack_from("<HHQ", data, at + 4)
        end = at + header + size
        if version != 1 or header != 16 or end > len(data):
            at = data.find(_FAT_BINARY, at + 4)
            continue
        entry = at + header
        while entry < end:
            kind, _, entry_header, entry_size = struct.unpack_from("<HHIQ", data, entry)
            (made_for,) = struct.unpack_from("<I", data, entry + 28)
            if kind != _CUBIN or made_for != architecture:
                begin = entry + entry_header
                data[begin : begin + entry_size] = bytes(entry_size)
            entry += entry_header + entry_size
        at = data.find(_FAT_BINARY, end)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    chosen = running.add_mutually_exclusive_group()
    chosen.add_argument("--call", choices=CALLS, help="run the steps of one call")
    chosen.add_argument(
        "--steps", nargs="+", choices=STEPS, default=[n for call in CALLS.values() for n in call]
    )
    running.add_argument("--wheels", type=Path)
    running.add_argument("--minutes", type=float, default=9.0, help="after which no step goes on")
    running.add_argument("--dry-run", action="store_true", help="run small forms of the steps without a GPU")
    running.add_argument("--out", type=Path, default=OUT, help="folder for the results")
    running.add_argument("--list", action="store_true", help="show the steps and their limits")
    wheels = commands.add_parser("wheels")
    wheels.add_argument("--into", type=Path, required=True)
    wheels.add_argument("--architecture", type=int, default=90, help="of the GPU; 90 is an H100 or H200")
    commands.add_parser("preflight", help="say what this machine lacks")
    options = parser.parse_args()
    if options.command == "wheels":
        gather(options.into, options.architecture)
    elif options.command == "preflight":
        lacks = preflight()
        print("\n".join(f"this machine lacks {each}" for each in lacks))
        sys.exit(len(lacks) > 0)
    elif options.list:
        for name, step in STEPS.items():
            print(f"{name:20} {step.limit:4} s  {step.command}")
    else:
        names = CALLS[options.call] if options.call else list(dict.fromkeys(options.steps))
        out = options.out.resolve()
        sys.exit(run(names, options.wheels, options.minutes, dry=options.dry_run, out=out) > 0)


if __name__ == "__main__":
    main()
