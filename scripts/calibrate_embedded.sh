#!/usr/bin/env bash
# The recorded calibrations of both embedded models: five seeds, every format, one GPU each (or one after the other).
#
#   bash scripts/calibrate_embedded.sh RESULTS WORK [SECONDS]
#
# RESULTS gets calibrate-MODEL.json, a log and the finished seeds of each model (MODEL-seeds/); WORK keeps what an
# unfinished run needs. The same command continues; on another machine, put MODEL-seeds/ into WORK first.
set -u
results=$1 work=$2 seconds=${3:-520}
mkdir -p "$results" "$work"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')

one() {
  local model=$1 gpu=$2 limit=$3
  local merge=()
  [ -d "$work/$model-seeds" ] && merge=(--merge "$work/$model-seeds")
  CUDA_VISIBLE_DEVICES=$gpu python -m hybridstate calibrate "$model" --profile paper --formats all \
    --seeds 5 --sequences 20 --tasks 4 --greedy --dtype float32 --device cuda --deadline "$limit" --force \
    "${merge[@]}" -o "$work/$model" --json > "$results/calibrate-$model.json" 2> "$results/$model.log"
  echo "$model: exit $?"
  # a finished run has removed these; what is left of an unfinished one is small without its recorded batches
  [ -d "$work/.$model.trajectories" ] && (cd "$work" && tar c --exclude='batch-*' --exclude='.lock' ".$model.trajectories") |
    (mkdir -p "$results/$model-seeds" && tar x -C "$results/$model-seeds" --strip-components 1)
  return 0
}

if [ "$gpus" -ge 2 ]; then
  one tiny-gdn 0 "$seconds" &
  one tiny-kda 1 "$seconds" &
  wait
else
  one tiny-gdn 0 $((seconds / 2))
  one tiny-kda 0 $((seconds / 2))
fi
