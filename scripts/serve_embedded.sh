#!/usr/bin/env bash
# The recorded `bench serve` of both embedded models, and the exchange between ranks. A GPU serves one run at a time.
#
#   [MODELS=tiny-kda] [CUTOFFS="16 64"] [THINK=8] bash scripts/serve_embedded.sh RESULTS [SECONDS] [EARLIER]
#
# With eight GPUs each model gets half of them; with fewer the models follow each other on all. RESULTS gets
# serve-MODEL.json, then serve-MODEL-kv.json (states and attention tokens under one budget: FP32, BF16, DAMP),
# exchange-tiny-kda.json and logs; with THINK seconds between turns the names end in -think. No run begins after
# SECONDS, and what is missing is said in the result. A folder EARLIER of an earlier call is continued: its complete
# points are not run again.
set -u
results=$1 seconds=${2:-480} earlier=${3:-}
models=(${MODELS:-tiny-kda tiny-gdn}) cutoffs=()
think=(--think "${THINK:-0}") suffix=${THINK:+-think}
for cutoff in ${CUTOFFS:-64}; do cutoffs+=(--w-max "$cutoff"); done
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
  CUDA_VISIBLE_DEVICES=$visible python -m hybridstate bench serve "$model" --plan "plans/$model" "${cutoffs[@]}" "${think[@]}" "$@" \
    --workers "$workers" --deadline "$left" --device cuda --force "${resume[@]}" -o "$results/$name.json" \
    > "$results/$name.log" 2>&1
  echo "$name on GPUs $visible: exit $?"
}

one() {
  local model=$1 visible=$2 workers=$3 until=$4
  serve "$model" "serve-$model$suffix" "$visible" "$workers" $((until - (SECONDS - started))) \
    --arm nr --arm wr --arm int8 --arm damp --arm nr+int8 --arm damp+nr
  serve "$model" "serve-$model-kv$suffix" "$visible" "$workers" $((until - (SECONDS - started))) \
    --arm bf16 --arm damp --budget-scope state+kv --limit 32 --no-control
}

[ "$gpus" -ge 4 ] && ranks=4 || ranks=2
[ "$gpus" -ge 2 ] && [ -z "$earlier" ] && exchange "$ranks"
count=${#models[@]}
if [ "$gpus" -ge 8 ] && [ "$count" -eq 2 ]; then
  half=$((gpus / 2))
  one "${models[0]}" "$(seq -s, 0 $((half - 1)))" "$half" "$seconds" &
  one "${models[1]}" "$(seq -s, "$half" $((2 * half - 1)))" "$half" "$seconds" &
  wait
else
  for number in "${!models[@]}"; do
    one "${models[$number]}" "$(seq -s, 0 $((gpus - 1)))" "$gpus" $((seconds * (number + 1) / count))
  done
fi
for log in "$results"/*.log; do
  echo "== $log"
  tail -n 14 "$log"
done
