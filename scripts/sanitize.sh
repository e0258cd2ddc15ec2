#!/usr/bin/env bash
# compute-sanitizer over a small run of every kernel: memcheck, racecheck, initcheck, synccheck.
# A planted stray store has to be found first; where the tool cannot see this device, the answer is "not supported"
# and exit code 3, never a pass. `--short`: one run of each kernel, memcheck and racecheck alone.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tool=${COMPUTE_SANITIZER:-compute-sanitizer}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 PYTHONPATH=.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)}

checks="memcheck racecheck initcheck synccheck"
some=""
if [[ ${1:-} == --short ]]; then
    checks="memcheck racecheck"
    some=--short
fi

unsupported() {
    echo "sanitize: not supported here: $1"
    exit 3
}

command -v "$tool" >/dev/null || unsupported "no compute-sanitizer on the PATH"
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || unsupported "no CUDA device"

# Unchecked first: kernels are compiled then, and wrong results are not the sanitizer's business.
"$python" -m tests.kernels.sanitize_kernels $some || { echo "sanitize: the kernels fail without a sanitizer"; exit 1; }

planted=$("$tool" --tool memcheck --error-exitcode 9 "$python" -m tests.kernels.sanitize_kernels --plant 2>&1)
code=$?
if ! grep -q 'Invalid __global__ write' <<<"$planted"; then
    tail -n 3 <<<"$planted"
    unsupported "a planted stray store was not found (exit code $code)"
fi
echo "sanitize: the planted stray store was found"

failed=0
for check in $checks; do
    if output=$("$tool" --tool "$check" --error-exitcode 9 "$python" -m tests.kernels.sanitize_kernels $some 2>&1); then
        echo "sanitize: $check clean, $(grep -c '^ok ' <<<"$output") runs"
    else
        failed=1
        echo "sanitize: $check found errors or could not finish"
        tail -n 40 <<<"$output"
    fi
done
exit $failed
