#!/usr/bin/env bash
# compute-sanitizer over a small run of every kernel: memcheck, racecheck, initcheck, synccheck.
# A planted stray store and a planted race have to be found first; where the tool cannot see this device, the answer is
# "not supported" and exit code 3, never a pass. `--short`: one run of each kernel, memcheck and racecheck alone;
# `--only TEXT...`: racecheck alone, of the runs with a text in their name.
set -uo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
tool=${COMPUTE_SANITIZER:-compute-sanitizer}
export PYTORCH_NO_CUDA_MEMORY_CACHING=1 OMP_NUM_THREADS=1 PYTHONPATH=.
export TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-$(mktemp -d)}

checks="memcheck racecheck initcheck synccheck"
some=("$@")
case ${1:-} in
    --short) checks="memcheck racecheck" ;;
    --only) checks="racecheck" ;;
esac

unsupported() {
    echo "sanitize: not supported here: $1"
    exit 3
}

command -v "$tool" >/dev/null || unsupported "no compute-sanitizer on the PATH"
"$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' || unsupported "no CUDA device"

# Unchecked first: kernels are compiled then, and wrong results are not the sanitizer's business.
"$python" -m tests.kernels.sanitize_kernels "${some[@]}" || { echo "sanitize: the kernels fail without a sanitizer"; exit 1; }

# find_planted CHECK OPTION TEXT: a planted fault, as the tool names it.
find_planted() {
    local output code
    output=$("$tool" --tool "$1" --error-exitcode 9 "$python" -m tests.kernels.sanitize_kernels "$2" 2>&1)
    code=$?
    if ! grep -q "$3" <<<"$output"; then
        tail -n 3 <<<"$output"
        unsupported "what was planted for $1 was not found (exit code $code)"
    fi
    echo "sanitize: the fault planted for $1 was found"
}
if [[ $checks == *memcheck* ]]; then
    find_planted memcheck --plant 'Invalid __global__ write'
fi
find_planted racecheck --plant-race 'Race reported between Write access'

failed=0
for check in $checks; do
    if output=$("$tool" --tool "$check" --error-exitcode 9 "$python" -m tests.kernels.sanitize_kernels "${some[@]}" 2>&1); then
        echo "sanitize: $check clean, $(grep -c '^ok ' <<<"$output") runs"
    else
        failed=1
        echo "sanitize: $check found errors or could not finish"
        tail -n 40 <<<"$output"
    fi
done
exit $failed
