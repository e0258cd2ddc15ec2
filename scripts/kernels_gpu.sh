#!/usr/bin/env bash
# Everything of the decode kernels that needs a GPU, in one go: `scripts/kernels_gpu.sh OUT [SECONDS]` (330 by default).
# Checks run first, all cores busy, and the timed kernels are compiled beside them; then the GPU is timed by one process at
# a time, most wanted first. Every part has its own limit and its own files in OUT; a part that fails or runs out of time
# does not stop the others. summary.txt names each part with its exit code (124: out of time, 3: not supported here).
set -uo pipefail
cd "$(dirname "$0")/.."
out=$(mkdir -p "$1" && cd "$1" && pwd)
total=${2:-330}
python=${PYTHON:-python3}
export PYTHONPATH=$PWD OMP_NUM_THREADS=1
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$out/../triton-cache}
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
}

# 1. Checks, with the kernels that are timed later compiled beside them.
for number in 0 1 2 3 4 5; do
    nice timeout 105 "$python" scripts/update_gpu.py "$out/unused.json" --warm "$number" >"$out/warm-$number.log" 2>&1 &
    nice timeout 105 "$python" scripts/update_gpu.py "$out/unused.json" --warm "$number" --overlap \
        --format fp32 --format damp >"$out/warm-overlap-$number.log" 2>&1 &
done
part tests 110 "$python" -m pytest -q -m gpu -p no:benchmark -p no:cacheprovider -n 8 --maxfail=40 \
    tests/kernels tests/runtime/test_tensor_store_gpu.py tests/bench/test_update.py
wait

# 2. Times, one process at a time.
part update 85 "$python" scripts/update_gpu.py "$out/update.json" --deadline 78
part ring 70 "$python" scripts/ring_tune.py --out "$out/ring" --deadline 66
part update-overlap 35 "$python" scripts/update_gpu.py "$out/update-overlap.json" --overlap --deadline 32 \
    --format fp32 --format damp --batch 1 --batch 8 --batch 64 --batch 128 --batch 256 --batch 512
part codecs 40 "$python" scripts/measure_codecs.py "$out/codecs.json" --skip-tests --skip-tuning --deadline 36
part bytes 30 "$python" scripts/kernel_bytes.py --out "$out/bytes.json"
part tune 70 "$python" scripts/kernel_tune.py --out "$out/tune" --deadline 65
part sanitize 400 env PYTHON="$python" scripts/sanitize.sh
cat "$out/summary.txt"
