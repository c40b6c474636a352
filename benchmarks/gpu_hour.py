"""Run everything that is worth running on a machine with a GPU, in order of worth, each step with a limit.

    python benchmarks/gpu_hour.py wheels --into .gpu-wheels   # before: what a machine without a network lacks
    python benchmarks/gpu_hour.py run --wheels .gpu-wheels    # there: results in out/gpu-hour after each step
    python benchmarks/gpu_hour.py run --steps self-check tests --minutes 9
    python benchmarks/gpu_hour.py run --list
    python benchmarks/gpu_hour.py run --dry-run   # anywhere: the same programs, small, without a GPU

The machine needs Python 3.12, torch with CUDA, Triton and pytest. nccl from version 2.30 on takes several
ranks on one GPU; its wheel has code for many generations of GPUs, of which ``wheels`` keeps one.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shutil
import struct
import subprocess
import sys
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
    """A command and the seconds it may take."""

    command: str
    limit: int
    environment: Mapping[str, str] = MappingProxyType({})
    dry: str = ""
    """The command of a dry run, if it is another one."""


#: What lets programs run without a GPU (``no_gpu.py``).
DRY = {"DCT_DRY_RUN": "1", "TRITON_INTERPRET": "1"}
_COLLECT = "{python} -m pytest tests/gpu -q -p no:cacheprovider -p no:xdist -m 'slow or not slow'"
_TESTS = "{python} -m pytest tests/gpu -q -p no:cacheprovider --timeout 200 -n {cores}"
STEPS = {
    "versions": Step(
        "nvidia-smi; {python} -m dct_plugin.cli doctor", 60, dry="{python} -m dct_plugin.cli doctor"
    ),
    "self-check": Step(
        "{python} -m pytest tests/gpu -q -p no:cacheprovider -k self_check",
        120,
        dry="{python} -m pytest tests/kernels/test_self_check.py -q -p no:cacheprovider -p no:xdist",
    ),
    "tests": Step(_TESTS, 420, dry=_COLLECT),
    "steps": Step("{python} benchmarks/gpu.py --json {out}/gpu.json --trace {out}/trace.json.gz", 240),
    "quality": Step(
        "{python} benchmarks/studies/gpu_quality.py --steps 540 --results {out}/quality.jsonl",
        420,
        dry="{python} benchmarks/studies/gpu_quality.py --steps 5 --text dct_plugin/config "
        "--settings default --results {out}/quality.jsonl",
    ),
    "transformer-engine": Step(  # what is skipped needs Transformer Engine
        "{python} -m pytest tests/gpu/test_gpu_megatron.py -q -rs -p no:cacheprovider -k transformer_engine",
        180,
        dry=_COLLECT + " -k transformer_engine",
    ),
    **{
        f"selection-{numel}": Step(
            f"{{python}} benchmarks/gpu.py --no-steps --numel {numel} --json {{out}}/gpu-{numel}.json", 90
        )
        for numel in (10**6, 10**7, 10**9)
    },
    "one-queue": Step(
        "{python} benchmarks/gpu.py --numel 1000000 --json {out}/gpu-one-queue.json",
        200,
        {"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
        dry="{python} benchmarks/gpu.py --no-steps --json {out}/gpu-one-queue.json",
    ),
    **{
        tool: Step(
            f"compute-sanitizer --tool {tool} --error-exitcode 1 {_TESTS} -k every_entry",
            240,
            dry=_COLLECT + " -k every_entry",
        )
        for tool in ("memcheck", "racecheck")
    },
}


def run(names: list[str], wheels: Path | None, minutes: float, *, dry: bool = False, out: Path = OUT) -> int:
    """Run steps until the time is up, or small ones without a GPU; return the number of those that failed."""
    out.mkdir(parents=True, exist_ok=True)
    end, results, failed = time.monotonic() + 60 * minutes, {}, 0
    environment = _installed(wheels) if wheels else dict(os.environ)
    environment |= DRY if dry else {}
    for name in names:
        step, left = STEPS[name], end - time.monotonic()
        if left < 20:
            print(f"{name}: not begun, the time is up", flush=True)
            continue
        text = step.dry if dry and step.dry else step.command
        command = text.format(python=sys.executable, out=out, cores=max(1, (os.cpu_count() or 2) - 4))
        begin, log = time.monotonic(), out / f"{name}.log"
        with log.open("w") as file:
            variables = {**environment, **step.environment}
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
                code = process.wait(left if dry else min(step.limit, left))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                code = -9
        seconds = time.monotonic() - begin
        failed += code != 0
        results[name] = {"command": command, "exit": code, "seconds": round(seconds, 1), "dry_run": dry}
        (out / "steps.json").write_text(json.dumps(results, indent=1) + "\n")
        print(f"{name}: exit {code}, {seconds:.0f} s, {log}", flush=True)
        print("\n".join(log.read_text(errors="replace").splitlines()[-12:]), flush=True)
    return failed


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
    running.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS))
    running.add_argument("--wheels", type=Path)
    running.add_argument("--minutes", type=float, default=60.0, help="after which no step goes on")
    running.add_argument("--dry-run", action="store_true", help="run small forms of the steps without a GPU")
    running.add_argument("--out", type=Path, default=OUT, help="folder for the results")
    running.add_argument("--list", action="store_true", help="show the steps and their limits")
    wheels = commands.add_parser("wheels")
    wheels.add_argument("--into", type=Path, required=True)
    wheels.add_argument("--architecture", type=int, default=90, help="of the GPU; 90 is an H100 or H200")
    options = parser.parse_args()
    if options.command == "wheels":
        gather(options.into, options.architecture)
    elif options.list:
        for name, step in STEPS.items():
            print(f"{name:20} {step.limit:4} s  {step.command}")
    else:
        sys.exit(
            run(
                options.steps, options.wheels, options.minutes, dry=options.dry_run, out=options.out.resolve()
            )
            > 0
        )


if __name__ == "__main__":
    main()
