#!/usr/bin/env bash
# The recorded `bench quality` of both embedded models: four processes, a model to a GPU (or all on one).
#
#   bash scripts/quality_embedded.sh RESULTS [SECONDS] [XQUAD]
#
# RESULTS gets quality-MODEL.json (the model's own tasks), quality-MODEL-ruler.json and their logs; a run that is killed
# leaves *.partial.json of the same form. No block is begun after SECONDS. XQUAD is a file in SQuAD's form; without it
# qa_1 is left out. `python scripts/quality_tables.py quality-MODEL.json quality-MODEL-ruler.json FOLDER` makes tables
# and figures.
set -u
results=$1 seconds=${2:-110} qa=${3:-}
mkdir -p "$results"
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
questions=()
[ -n "$qa" ] && [ -f "$qa" ] && questions=(--qa "$qa")

one() {
  local model=$1 gpu=$2 name=$3
  shift 3
  CUDA_VISIBLE_DEVICES=$gpu python -m hybridstate bench quality "$model" --plan "plans/$model" --tokens 4096 \
    --replays 3 --resident --repeats 3 --dtype float32 --within "$seconds" --device cuda --force "$@" \
    -o "$results/$name.json" > "$results/$name.log" 2>&1
  echo "$name: exit $?"
}

if [ "$gpus" -ge 2 ]; then second=1; else second=0; fi
one tiny-gdn 0 quality-tiny-gdn --tasks own --questions 40 &
one tiny-kda "$second" quality-tiny-kda --tasks own --questions 40 &
one tiny-gdn 0 quality-tiny-gdn-ruler --tasks ruler --questions 20 "${questions[@]}" &
one tiny-kda "$second" quality-tiny-kda-ruler --tasks ruler --questions 20 "${questions[@]}" &
wait
tail -n 8 "$results"/quality-*.log
