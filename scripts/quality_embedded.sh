#!/usr/bin/env bash
# The recorded `bench quality` of both embedded models: four runs, spread over the GPUs, one at a time on each.
#
#   bash scripts/quality_embedded.sh RESULTS [SECONDS] [XQUAD] [EARLIER]
#
# RESULTS gets quality-MODEL.json (the model's own tasks), quality-MODEL-ruler.json and their logs; a run that is killed
# leaves *.partial.json of the same form. No block is begun after SECONDS. XQUAD is a file in SQuAD's form; without it,
# or with "", qa_1 is left out. A folder EARLIER of an earlier call is continued: its blocks are not run again.
# CUDA_VISIBLE_DEVICES says which GPUs. `python scripts/quality_tables.py quality-MODEL.json quality-MODEL-ruler.json
# FOLDER` makes tables and figures.
set -u
results=$1 seconds=${2:-480} qa=${3:-} earlier=${4:-}
mkdir -p "$results"
count=$(python -c 'import torch; print(torch.cuda.device_count())')
[ "$count" -ge 1 ] || { echo "no GPU is visible" >&2; exit 1; }
if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
  IFS=, read -ra gpus <<< "$CUDA_VISIBLE_DEVICES"
  gpus=("${gpus[@]:0:$count}")
else
  mapfile -t gpus < <(seq 0 $((count - 1)))
fi
questions=()
[ -n "$qa" ] && [ -f "$qa" ] && questions=(--qa "$qa")

one() {
  local gpu=$1 model=$2 name=$3 left=$((seconds - SECONDS)) resume=()
  shift 3
  if [ -n "$earlier" ] && grep -q '"complete": *true' "$earlier/$name.json" 2> /dev/null; then
    [ "$earlier/$name.json" -ef "$results/$name.json" ] || cp "$earlier/$name.json" "$results/"
    echo "$name: complete before"
    return
  fi
  [ "$left" -lt 20 ] && { echo "$name: no time left"; return; }
  for file in "$earlier/$name.json" "$earlier/$name.partial.json"; do
    [ -n "$earlier" ] && [ -f "$file" ] && [ ${#resume[@]} -eq 0 ] && resume=(--resume "$file")
  done
  CUDA_VISIBLE_DEVICES=$gpu python -m hybridstate bench quality "$model" --plan "plans/$model" --tokens 4096 \
    --replays 3 --resident --repeats 3 --dtype float32 --within "$((left - 10))" --device cuda --force "$@" \
    "${resume[@]}" -o "$results/$name.json" > "$results/$name.log" 2>&1
  echo "$name on GPU $gpu: exit $?, $SECONDS s"
}

run() {
  case $2 in
    0) one "$1" tiny-gdn quality-tiny-gdn --tasks own --questions 40 ;;
    1) one "$1" tiny-kda quality-tiny-kda --tasks own --questions 40 ;;
    2) one "$1" tiny-gdn quality-tiny-gdn-ruler --tasks ruler --questions 20 "${questions[@]}" ;;
    3) one "$1" tiny-kda quality-tiny-kda-ruler --tasks ruler --questions 20 "${questions[@]}" ;;
  esac
}

for place in "${!gpus[@]}"; do
  for ((number = place; number < 4; number += ${#gpus[@]})); do run "${gpus[$place]}" "$number"; done &
done
wait
for log in "$results"/quality-*.log; do
  [ -f "$log" ] || continue
  echo "== $log"
  tail -n 8 "$log"
done
