#!/usr/bin/env bash
# Everything of the decode kernels that needs a GPU, in one go: `scripts/kernels_gpu.sh OUT [SECONDS]` (260 by default).
# Made for 16 cores. Checks run first, and the timed kernels are compiled beside them; then the GPU is timed by one process
# at a time, most wanted first. Every part has its own limit and its own files in OUT; a part that fails or runs out of time
# does not stop the others. summary.txt names each part with its exit code (124: out of time, 3: not supported here).
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
total=${2:-260}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/../triton-cache}
checks=100
start=$SECONDS
: >"$out/summary.txt"

part() { # NAME SECONDS COMMAND...: run within its limit and what is left of the total
    local name=$1 limit=$2 left=$((total - (SECONDS - start))) began=$SECONDS code
    shift 2
    ((limit < left)) || limit=$left
    if ((limit < 5)); then
        echo "$name: no time left" | tee -a "$out/summary.txt"
        return
    fi
    timeout "$limit" "$@" >"$out/$name.log" 2>&1
    code=$?
    echo "$name: exit $code, $((SECONDS - began)) s; $(tail -n 1 "$out/$name.log" | cut -c1-160)" | tee -a "$out/summary.txt"
    # tests name a failure when it happens, so that those of a run out of time are known
    grep -h '^FAILED at' "$out/$name.log" | cut -c1-300 | tee -a "$out/summary.txt"
}

compile() { # NAME COMMAND...: beside the checks, behind them in priority
    local name=$1
    shift
    nice timeout "$checks" "$python" "$@" >"$out/compile-$name.log" 2>&1 &
}

# 1. Checks, with the kernels that are timed later compiled beside them, those of the first layers first.
for number in 0 1 2 3 4; do
    compile "update-$number" scripts/update_gpu.py "$out/unused.json" \
        --warm "$number" --warm $((number + 5)) --warm $((number + 10)) --warm $((number + 15))
done
compile codecs scripts/measure_codecs.py --compile 4,16
compile tokens scripts/measure_codecs.py --compile tokens
part tests "$checks" "$python" -m pytest -q -m gpu -p tests.named_failures -p no:benchmark -p no:cacheprovider -n 12 \
    --dist worksteal --tb=short --maxfail=40 --durations=25 tests/kernels tests/runtime/test_tensor_store_gpu.py tests/bench/test_update.py
wait

# 2. Times, one process at a time.
part update 115 "$python" scripts/update_gpu.py "$out/update.json" --deadline 108
part update-overlap 20 "$python" scripts/update_gpu.py "$out/update-overlap.json" --overlap --deadline 15 \
    --format fp32 --format damp --batch 8 --batch 64 --batch 128 --batch 256
part ragged 15 "$python" scripts/measure_codecs.py "$out/ragged.json" --ragged --deadline 15
part codecs 28 "$python" scripts/measure_codecs.py "$out/codecs.json" --skip-tests --skip-tuning --deadline 24
part bytes 25 "$python" scripts/kernel_bytes.py --out "$out/bytes.json"
part sanitize 120 env PYTHON="$python" scripts/sanitize.sh --short

# 3. What a longer run adds.
part ring 70 "$python" scripts/ring_tune.py --out "$out/ring" --deadline 66
part tune 70 "$python" scripts/kernel_tune.py --out "$out/tune" --deadline 65
cat "$out/summary.txt"
