#!/usr/bin/env bash
# The recorded `bench serve` of both embedded models, and the exchange between ranks. A GPU serves one run at a time.
#
#   [MODELS=tiny-kda] [PARTS="sweep limits"] [CUTOFF=64] [THINK=1] [SEEDS=5] bash scripts/serve_embedded.sh RESULTS [SECONDS] [EARLIER]
#
# The models run side by side, each on its share of the GPUs; with fewer GPUs than models they follow each other, each
# for its share of the time that is left. Parts:
#   sweep   every arm at every working set, then the control        serve-MODEL.json
#   limits  compositions, and one seed of the smaller limits, at the working set that the sweep chose, same file
#   kv      states and attention tokens under one budget: FP32, BF16, DAMP                    serve-MODEL-kv.json
#   ranks   TP 2 with both placements at that working set, and the exchange        serve-MODEL-tp2.json, exchange-tiny-kda.json
# With THINK seconds between turns the names end in -think. No run begins after SECONDS, and what is missing is said in
# the results. A folder EARLIER of an earlier call is continued: its complete points are not run again.
set -u
results=$1 seconds=${2:-480} earlier=${3:-}
until=$seconds
models=(${MODELS:-tiny-kda tiny-gdn})
parts=" ${PARTS:-sweep limits kv ranks} "
suffix=${THINK:+-think}
started=$SECONDS
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
share=$((gpus / ${#models[@]}))
[ "$share" -ge 1 ] || share=$gpus
export OMP_NUM_THREADS=2
mkdir -p "$results"
[ "$gpus" -ge 1 ] || { echo "no GPU here"; exit 3; }
failed=$results/.failed
rm -f "$failed"
for file in "$earlier"/serve-*.json; do
  name=$(basename "$file" .json)
  [ -n "$earlier" ] && [ -f "$file" ] && ! ls "$results/${name%.partial}".*json > /dev/null 2>&1 && cp "$file" "$results/"
done

left() { echo $((until - (SECONDS - started))); }

# serve NAME GPUS MODEL OPTIONS: goes on from NAME.json, or from what a run that was cut off left of it, which holds
# what was known before; NAME.json is replaced when a run has ended.
serve() {
  local name=$1 visible=$2 model=$3 resume=() file status
  shift 3
  [ "$(left)" -lt 45 ] && { echo "$name: no time left"; return; }
  for file in "$results/$name.partial.json" "$results/$name.json"; do
    if [ -f "$file" ]; then
      cp "$file" "$results/$name-before.json"
      resume=(--resume "$results/$name-before.json")
      break
    fi
  done
  CUDA_VISIBLE_DEVICES=$visible python -m hybridstate bench serve "$model" --w-max "${CUTOFF:-64}" --think "${THINK:-0}" \
    "$@" --deadline "$(left)" --device cuda --force "${resume[@]}" -o "$results/$name.json" >> "$results/$name.log" 2>&1
  status=$?
  echo "$name on GPUs $visible: exit $status"
  [ "$status" = 0 ] || echo "$name" >> "$failed"
}

# chosen FILE: the working set that the rule chose there.
chosen() {
  python -c 'import json, sys; print(json.load(open(sys.argv[1]))["result"]["operating_point"]["ratio"])' "$1"
}

one() {
  local model=$1 visible=$2 arms=(--arm nr --arm wr --arm int8 --arm damp)
  local name=serve-$model$suffix plan=(--plan "plans/$model" --workers "$share") seeds=(--seeds "${SEEDS:-5}")
  if [[ $parts == *" sweep "* ]]; then
    serve "$name" "$visible" "$model" "${plan[@]}" "${arms[@]}" "${seeds[@]}" --limit 32
  fi
  if [[ $parts == *" limits "* ]] && [ -f "$results/$name.json" ]; then
    local at=(--ratio "$(chosen "$results/$name.json")" --no-control)
    serve "$name" "$visible" "$model" "${plan[@]}" "${at[@]}" "${seeds[@]}" --limit 32 --arm nr+int8 --arm damp+nr
    serve "$name" "$visible" "$model" "${plan[@]}" "${at[@]}" "${arms[@]}" --seeds 1 --limit 32 --limit 16 --limit 8
  fi
  if [[ $parts == *" kv "* ]]; then
    serve "serve-$model-kv$suffix" "$visible" "$model" "${plan[@]}" "${seeds[@]}" --arm bf16 --arm damp \
      --budget-scope state+kv --limit 32 --no-control
  fi
}

if [ "$share" -lt "$gpus" ]; then
  for number in "${!models[@]}"; do
    one "${models[$number]}" "$(seq -s, $((number * share)) $(((number + 1) * share - 1)))" &
  done
  wait
else
  for number in "${!models[@]}"; do
    passed=$((SECONDS - started))
    until=$((passed + (seconds - passed) / (${#models[@]} - number)))
    one "${models[$number]}" "$(seq -s, 0 $((gpus - 1)))"
  done
  until=$seconds
fi

if [[ $parts == *" ranks "* ]] && [ "$gpus" -ge 2 ]; then
  for model in "${models[@]}"; do
    file="$results/serve-$model$suffix.json"
    ratio=1
    [ -f "$file" ] && ratio=$(chosen "$file")
    serve "serve-$model-tp2$suffix" 0,1 "$model" --arm nr --arm wr --arm int8 --tp 2 --balance off --balance storage \
      --ratio "$ratio" --seeds "${SEEDS:-5}" --limit 32 --no-control
  done
  if [ "$(left)" -ge 45 ]; then
    python -m hybridstate bench exchange tiny-kda --tp 2 --w-max 16 --w-max 64 --balance off --balance storage \
      --checkpoints 1 --checkpoints 8 --checkpoints 64 --device cuda --force -o "$results/exchange-tiny-kda.json" \
      > "$results/exchange.log" 2>&1
    status=$?
    echo "exchange between 2 GPUs: exit $status"
    [ "$status" = 0 ] || echo exchange >> "$failed"
  fi
fi
for log in "$results"/*.log; do
  [ -f "$log" ] || continue
  echo "== $log"
  tail -n 14 "$log"
done
[ ! -f "$failed" ]
