#!/usr/bin/env bash
# The recorded `bench serve` of both embedded models, and the exchange between ranks. A GPU serves one run at a time.
#
#   bash scripts/serve_embedded.sh RESULTS [SECONDS] [EARLIER]
#
# With two GPUs or more each model gets half of them, with one the models follow each other. RESULTS gets
# serve-MODEL.json, then serve-MODEL-kv.json (states and attention tokens under one budget: FP32, BF16, DAMP),
# exchange-tiny-kda.json and logs; no run begins after SECONDS, and what is missing is said in the result. A folder
# EARLIER of an earlier call is continued: its complete points are not run again.
set -u
results=$1 seconds=${2:-480} earlier=${3:-}
mkdir -p "$results"
started=$SECONDS
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
export OMP_NUM_THREADS=2

exchange() {
  local ranks=$1
  python -m hybridstate bench exchange tiny-kda --tp "$ranks" --w-max 16 --w-max 64 --balance off --balance storage \
    --checkpoints 1 --checkpoints 8 --checkpoints 64 --device cuda --force -o "$results/exchange-tiny-kda.json" \
    > "$results/exchange.log" 2>&1
  echo "exchange between $ranks GPUs: exit $?"
}

serve() {
  local model=$1 name=$2 visible=$3 workers=$4 left=$5 resume=()
  shift 5
  [ "$left" -lt 45 ] && { echo "$name: no time left"; return; }
  for file in "$earlier/$name.json" "$earlier/$name.partial.json"; do
    [ -n "$earlier" ] && [ -f "$file" ] && [ ${#resume[@]} -eq 0 ] && resume=(--resume "$file")
  done
  CUDA_VISIBLE_DEVICES=$visible python -m hybridstate bench serve "$model" --plan "plans/$model" --w-max 64 "$@" \
    --workers "$workers" --deadline "$left" --device cuda --force "${resume[@]}" -o "$results/$name.json" \
    > "$results/$name.log" 2>&1
  echo "$name on GPUs $visible: exit $?"
}

one() {
  local model=$1 visible=$2 workers=$3 until=$4
  serve "$model" "serve-$model" "$visible" "$workers" $((until - (SECONDS - started))) \
    --arm nr --arm wr --arm int8 --arm damp --arm nr+int8 --arm damp+nr
  serve "$model" "serve-$model-kv" "$visible" "$workers" $((until - (SECONDS - started))) \
    --arm bf16 --arm damp --budget-scope state+kv --limit 32 --no-control
}

if [ "$gpus" -ge 2 ]; then
  ranks=2
  [ "$gpus" -ge 4 ] && ranks=4
  exchange "$ranks"
  half=$((gpus / 2))
  one tiny-kda "$(seq -s, 0 $((half - 1)))" "$half" "$seconds" &
  one tiny-gdn "$(seq -s, "$half" $((2 * half - 1)))" "$half" "$seconds" &
  wait
else
  one tiny-kda 0 1 $((seconds / 2))
  one tiny-gdn 0 1 "$seconds"
fi
for log in "$results"/*.log; do
  echo "== $log"
  tail -n 14 "$log"
done
