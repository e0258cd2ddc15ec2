#!/usr/bin/env bash
# The whole path on both embedded models, with whatever this machine has, into ./demo/<model>/.
# The counts below are small, so that two CPU cores finish in about five minutes; the README's tables come from full runs.
set -euo pipefail
cd "$(dirname "$0")/.."
hybridstate=${HYBRIDSTATE:-.venv/bin/hybridstate}
# The models are so small that a second thread gains little, and on a busy machine costs much.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
out=${DEMO_FOLDER:-demo}
w_max=64       # cutoff of the exported plan
questions=8    # per task, and prose prefixes
tokens=1024    # length of a prompt
masks=2        # random masks per cutoff

run() {
    printf '\n$ hybridstate %s\n' "$*"
    "$hybridstate" "$@"
}

began=$SECONDS
echo "hybridstate demo: analyze, calibrate, export-plan, verify and bench on tiny-gdn and tiny-kda"
echo "small on purpose: $questions synthetic questions per task of $tokens tokens, $masks random masks, the quick calibration"
echo "takes about five minutes on two free CPU cores; what each table means: README.md"
rm -rf "$out"
mkdir -p "$out"
run doctor

for model in tiny-gdn tiny-kda; do
    to=$out/$model
    echo
    echo "=== $model ==="
    run analyze "$model" -o "$to/analysis"
    run calibrate "$model" --profile quick -o "$to/calibration"
    run export-plan "$model" --w-max $w_max --calibration "$to/calibration" --check -o "$to/exported"
    run plan verify "$to/exported" "$model"
    run verify "$model" "$to/exported"
    run bench restore "$model" --w-max 16 --w-max $w_max --questions $questions --tokens $tokens \
        --seeds $masks -o "$to/restore"
    run bench update "$model" --plan "$to/exported" -o "$to/update"
    run bench decode "$to/exported" --batch 1 --batch 8 -o "$to/decode"
done

cat <<END

Done in $((SECONDS - began)) s. For each of tiny-gdn and tiny-kda:
  $out/MODEL/analysis/     horizons and retained units: analysis.json, figures (.png) and the CSV behind each
  $out/MODEL/calibration/  risk of every key channel, the protected ones, and the validation against FP32
  $out/MODEL/exported/     the checkpoint with the channel order absorbed, and the plan in state_plan/; checked against the original
  $out/MODEL/restore/      quality and time after restoring a cached prefix: dense, zeros (NR), replay (WR), random masks
  $out/MODEL/update/       time of one recurrent update: FP32, BF16, FP16 and packed (damp) state
  $out/MODEL/decode/       time per output token: FP32 and packed (damp) state
Start with $out/tiny-kda/analysis/retained.png, then: $hybridstate plan show $out/tiny-kda/exported
With so few questions most answers are right in every row; the prose KL separates the arms.
Times measured on a CPU are those of the reference, not of the kernels. Tables of the full runs: README.md.
END
