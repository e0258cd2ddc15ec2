"""Check, time and tune the state transfers on one GPU within a deadline; every line is printed and stored at once.

    python scripts/measure_codecs.py RESULT.json [--deadline 85] [--skip-tests] [--skip-tuning]
    python scripts/measure_codecs.py RESULT.json --ragged
    python scripts/measure_codecs.py --compile 4,16|tokens

First the GPU tests of the transfers run in parallel processes beside others that compile the variants to be timed, so
that the timed process finds them compiled; with --skip-tests neither runs and --compile may have been used before.
Then `bench codecs` runs alone, then several tokens in one launch beside as many single steps, then launch shapes are
compared. --ragged only checks and times the transfer from ragged FP32 rows to packed slots in every launch shape.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

TESTS = (
    ("tests/kernels/test_transfer_gpu.py", "test_pack_and_unpack and plain"),
    ("tests/kernels/test_transfer_gpu.py", "test_pack_and_unpack and mapped"),
    ("tests/kernels/test_transfer_gpu.py", "test_dense_sides"),
    ("tests/kernels/test_transfer_gpu.py", "test_rows and fp32"),
    ("tests/kernels/test_transfer_gpu.py", "test_rows and int8"),
    (
        "tests/kernels/test_transfer_gpu.py",
        "not test_pack_and and not test_dense and not test_rows",
    ),
    ("tests/kernels/test_multi_token.py", "gdn and not one_requantisation"),
    ("tests/kernels/test_multi_token.py", "kda or one_requantisation"),
    ("tests/kernels/test_numerics.py", "4096 and gdn"),
    ("tests/kernels/test_numerics.py", "4096 and kda"),
)
SHAPES = {"warps": (2, 4, 8), "rows": (8, 16, 32)}
TUNED = (
    "pack fragment",
    "unpack fragment",
    "pack natural",
    "unpack natural",
    "gather fp32, ragged",
    "scatter fp32, ragged, zero fill",
    "gather int8, all units",
    "scatter int8, all units",
    "copy packed slots",
)


RAGGED_SHAPES: tuple[dict[str, int], ...] = (
    {"num_warps": 1},
    {"num_warps": 2},
    {"num_warps": 2, "maxnreg": 48},
    {"num_warps": 4},
    {"num_warps": 4, "maxnreg": 32},
    {"num_warps": 8},
)


class Record:
    """The result file, rewritten after every entry."""

    def __init__(self, path: Path, deadline: float) -> None:
        self.path, self.end, self.start = path, time.monotonic() + deadline, time.monotonic()
        names = ("tests", "codecs", "shapes", "tokens", "ragged")
        self.found: dict[str, Any] = {name: [] for name in names}

    def add(self, part: str, entry: dict[str, Any], line: str) -> None:
        """Store and print one entry."""
        self.found[part].append(entry)
        self.found["seconds"] = time.monotonic() - self.start
        self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        print(f"{time.monotonic() - self.start:5.1f} s  {line}", flush=True)

    @property
    def left(self) -> float:
        """Seconds to the deadline."""
        return self.end - time.monotonic()


def run_processes(record: Record, tuning: bool) -> bool:
    """Tests and compilation side by side; True if a test failed or did not end.

    A compilation that the deadline ends only means that the timed process compiles what is left.
    """
    jobs: list[tuple[str, list[str]]] = []
    options = ["-q", "-W", "ignore", "-p", "no:cacheprovider"]
    for path, names in TESTS:
        jobs.append((f"{Path(path).stem}: {names}", ["-m", "pytest", *options, path, "-k", names]))
    script = str(Path(__file__).resolve())
    jobs.append(("compile", [script, "--compile", "4,16"]))
    jobs.append(("compile tokens", [script, "--compile", "tokens"]))
    if tuning:
        for warps, rows in itertools.product(*SHAPES.values()):
            if (warps, rows) != (4, 16):
                jobs.append((f"compile {warps},{rows}", [script, "--compile", f"{warps},{rows}"]))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    running = [
        (name, subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ))
        for name, arguments in jobs
    ]  # fmt: skip
    for name, process in running:
        try:
            output, _ = process.communicate(timeout=max(record.left - 25, 1))
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            output += "\nended at the deadline"
        tail = (output.strip().splitlines() or [""])[-1]
        entry = {"name": name, "exit": process.returncode, "last_line": tail}
        if process.returncode:
            entry["output"] = output[-4000:]
            print(output[-3000:], flush=True)
        record.add("tests", entry, f"{name}: exit {process.returncode}, {tail}")
    return any(x["exit"] and not x["name"].startswith("compile") for x in record.found["tests"])


def shape(warps: int, rows: int) -> None:
    """Use this launch shape from here on."""
    from hybridstate.kernels import pack, transfer

    pack.WARPS = pack.PACK_WARPS = transfer.WARPS = warps
    transfer.BLOCK_ROWS = rows
    transfer.COPY_WORDS = rows * 128


def compile_variants(warps: int, rows: int) -> None:
    """Run every transfer once on few slots, with the specialisations of the timed sizes."""
    from dataclasses import replace

    import torch

    from hybridstate.bench.codec_work import KIMI_LINEAR, Workload
    from hybridstate.kernels import pack

    if (warps, rows) != (4, 16):
        shape(warps, rows)
    small = replace(KIMI_LINEAR, layers=2)
    work = Workload(small, 8, torch.device("cuda"), 0, "auto")
    for transfer in work.transfers():
        if (warps, rows) == (4, 16) or transfer.name in TUNED:
            transfer.run()
    if (warps, rows) == (4, 16):
        load, options = work.ragged_load(), pack.RAGGED_OPTIONS
        for pack.RAGGED_OPTIONS in (*RAGGED_SHAPES, options):
            load.run()
    torch.cuda.synchronize()


def tune(record: Record) -> None:
    """Microseconds of the main transfers by warps and key rows of a program."""
    import torch

    from hybridstate.bench.codec_work import KIMI_LINEAR, Workload
    from hybridstate.bench.timing import measure_launches

    work = [Workload(KIMI_LINEAR, 8, torch.device("cuda"), seed, "auto") for seed in range(2)]
    columns = [x for x in zip(*(w.transfers() for w in work), strict=True) if x[0].name in TUNED]
    for warps, rows in itertools.product(*SHAPES.values()):
        if record.left < 12:
            return
        shape(warps, rows)
        times: dict[str, float | str] = {}
        for same in columns:
            if same[0].name.startswith(("pack", "unpack")) and rows != 16:
                continue
            runs: list[Callable[[], None]] = [x.run for x in same]
            try:
                found = measure_launches(runs, device="cuda", repeat=7)
                times[same[0].name] = round(1e6 * found.median, 2)
            except Exception as error:  # one variant must not end the others
                times[same[0].name] = f"{type(error).__name__}: {error}"[:200]
        record.add(
            "shapes",
            {"warps": warps, "rows": rows, "us": times},
            f"{warps} warps, {rows} rows: {times}",
        )
    shape(4, 16)


def tokens(record: Record) -> None:
    """T tokens in one launch beside T single steps in one CUDA graph, packed and dense."""
    sizes = itertools.product(token_layouts(), ("gdn", "kda"), (1, 8), (16, 64))
    for layout, kind, batch, count in sizes:
        if record.left < 4:
            return
        name = f"{layout.layout_id} {kind} batch {batch} tokens {count}"
        try:
            many, single = time_tokens(layout, kind, batch, count)
        except Exception as error:  # one variant must not end the others
            record.add("tokens", {"name": name, "error": str(error)}, f"{name}: {error}"[:300])
            continue
        entry = {"name": name, "one_launch_s": many.to_json(), "single_steps_s": single.to_json()}
        line = f"{1e6 * many.median:.1f} µs in one launch, {1e6 * single.median:.1f} µs in {count}"
        record.add("tokens", entry, f"{name}: {line}")


def token_layouts() -> tuple[Any, ...]:
    """States that several tokens are timed on."""
    from hybridstate.kernels.layout import DenseLayout, PackedLayout

    natural = PackedLayout(128, 128, 16, order="natural")
    return PackedLayout(128, 128, 16), natural, DenseLayout(128, 128)


def time_tokens(layout: Any, kind: str, batch: int, count: int) -> tuple[Any, Any]:
    """Samples of one launch for `count` tokens and of as many single steps; 32 heads, states stay in the L2 cache."""
    import torch

    from hybridstate.bench.timing import measure_launches
    from hybridstate.kernels.layout import PackedLayout
    from hybridstate.kernels.multi_token import run_tokens
    from hybridstate.kernels.update import dense_step, packed_step

    heads, shape = 32, (batch, count, 32, 128)
    q, k, v = (torch.randn(shape, device="cuda").bfloat16() for _ in range(3))
    g = -0.2 * torch.rand(shape[: 4 if kind == "kda" else 3], device="cuda")
    beta = torch.rand(shape[:3], device="cuda")
    pool = layout.pack(torch.randn(batch, heads, 128, 128, device="cuda"))
    slots = torch.arange(batch, device="cuda")
    lengths = torch.full((batch,), count, dtype=torch.int32, device="cuda")
    singles = [[x[:, t].contiguous() for x in (q, k, v, g, beta)] for t in range(count)]
    step: Any = packed_step if isinstance(layout, PackedLayout) else dense_step
    out = torch.empty_like(singles[0][2])

    def once() -> None:
        run_tokens(q, k, v, g, beta, pool, slots, layout=layout, lengths=lengths)

    def each() -> None:
        for inputs in singles:
            step(*inputs, pool, slots, layout=layout, out=out)

    step(*singles[0], pool, slots, layout=layout, out=out)  # chooses its backend before the capture
    many = measure_launches([once], device="cuda", repeat=10)
    return many, measure_launches([each], device="cuda", repeat=10)


def ragged(record: Record) -> bool:
    """Ragged FP32 rows to packed slots in every launch shape: bytes against the torch twin, then times.

    Returns:
        Whether any shape gave other bytes or did not run.
    """
    from dataclasses import replace

    import torch

    from hybridstate.bench.codec_work import KIMI_LINEAR, QWEN3_NEXT, Workload
    from hybridstate.bench.codecs import compared_bytes
    from hybridstate.bench.timing import in_place_pass, measure_launches
    from hybridstate.kernels import pack

    failed, device, cpu = False, torch.device("cuda"), torch.device("cpu")
    for size in (KIMI_LINEAR, QWEN3_NEXT):
        small = replace(size, layers=2)
        truth = Workload(small, 2, cpu, 0, "reference", host_states=True).ragged_load()
        tried = Workload(small, 2, device, 0, "auto", host_states=True).ragged_load()
        work = [Workload(size, 8, device, seed, "auto").ragged_load() for seed in range(2)]
        memory_pass = in_place_pass(work[0].nbytes, 2, device=device, warmup=3, repeat=20).median
        for options in RAGGED_SHAPES:
            pack.RAGGED_OPTIONS = options
            name = f"{size.name} {', '.join(f'{k} {v}' for k, v in options.items())}"
            entry: dict[str, Any] = {"model": size.name, "options": options}
            try:
                compared, different = compared_bytes(truth, tried)
                found = measure_launches([x.run for x in work], device=device, repeat=20)
            except Exception as error:  # one variant must not end the others
                failed = True
                record.add("ragged", entry | {"error": str(error)}, f"{name}: {error}"[:300])
                continue
            failed |= different > 0
            share = memory_pass / found.median
            entry |= {"launch_s": found.to_json(), "share_of_pass": share, "different": different}
            line = f"{1e6 * found.median:.1f} us, {100 * share:.1f} % of the in-place pass"
            record.add("ragged", entry, f"{name}: {line}, {different} of {compared} bytes differ")
    return failed


def main() -> int:
    """Exit code 1 if a test or the check failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", nargs="?", type=Path)
    parser.add_argument("--deadline", type=float, default=85)
    parser.add_argument("--skip-tests", action="store_true")
    parser.add_argument("--skip-tuning", action="store_true")
    parser.add_argument("--ragged", action="store_true", help="that one transfer in every shape")
    parser.add_argument("--compile", metavar="WARPS,ROWS|tokens", help="compile and time nothing")
    given = parser.parse_args()
    if given.compile == "tokens":
        for layout, kind in itertools.product(token_layouts(), ("gdn", "kda")):
            time_tokens(layout, kind, 8, 16)
        return 0
    if given.compile:
        warps, rows = map(int, given.compile.split(","))
        compile_variants(warps, rows)
        return 0
    record = Record(given.result or Path("codecs-gpu.json"), given.deadline)
    if given.ragged:
        return int(ragged(record))
    failed = False if given.skip_tests else run_processes(record, not given.skip_tuning)
    from hybridstate.bench.codecs import run_codecs

    for size in ("kimi-linear", "qwen3-next"):
        if record.left < 12 and size != "kimi-linear":
            break
        try:
            report = run_codecs(
                models=[size],
                device="cuda",
                on_row=lambda row: print(
                    f"{row.model:12s} {row.transfer:48s} {row.nbytes:12,d} B {1e6 * row.launch.median:8.1f} µs "
                    f"{row.gb_per_s:7.0f} GB/s  {100 * row.share:5.1f} % of the in-place pass",
                    flush=True,
                ),
            )
        except Exception as error:  # the tuning can still be worth having
            record.add(
                "codecs", {"size": size, "error": str(error)}, f"bench codecs {size}: {error}"
            )
            failed = True
            continue
        record.add("codecs", report.to_json(), f"bench codecs {size}: {len(report.rows)} transfers")
    tokens(record)
    if not given.skip_tuning:
        try:
            tune(record)
        except Exception as error:  # what was stored stays
            print(f"shapes: {type(error).__name__}: {error}", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
