#!/usr/bin/env bash
# The recorded `bench quality` of both embedded models, one GPU each, or both at once on one.
#
#   bash scripts/quality_embedded.sh RESULTS [SECONDS] [XQUAD]
#
# RESULTS gets quality-MODEL.json and a log of each model; a run that is killed leaves quality-MODEL.partial.json of the
# same form. No block is begun after SECONDS. XQUAD is a file in SQuAD's form; without it qa_1 is left out.
set -u
results=$1 seconds=${2:-120} qa=${3:-}
mkdir -p "$results"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
questions=()
[ -n "$qa" ] && [ -f "$qa" ] && questions=(--qa "$qa")

one() {
  local model=$1 gpu=$2
  CUDA_VISIBLE_DEVICES=$gpu python -m hybridstate bench quality "$model" --plan "plans/$model" --tokens 4096 \
    --questions 30 --replays 3 --resident --repeats 3 --dtype float32 --within "$seconds" --device cuda --force \
    "${questions[@]}" -o "$results/quality-$model.json" > "$results/quality-$model.log" 2>&1
  echo "$model: exit $?"
}

if [ "$gpus" -ge 2 ]; then second=1; else second=0; fi
one tiny-gdn 0 &
one tiny-kda "$second" &
wait
tail -n 12 "$results"/quality-*.log
