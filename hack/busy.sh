#!/usr/bin/env bash
# busy.sh [N [ABREAST]] runs hack/test.sh N times, by default ten, beside four busy loops, ABREAST
# of them at a time, by default one, and prints a line for each run: its result, its seconds and the
# seeds that its tests have drawn. It fails if a run fails.
set -euo pipefail
cd "$(dirname "$0")/.."

runs="${1:-10}" abreast="${2:-1}"
logs="$(mktemp -d)"
loops=() lanes=()
# shellcheck disable=SC2317 # the trap calls it
end() {
  kill "${loops[@]}" "${lanes[@]}" 2>/dev/null || true
  echo "what the runs printed: $logs"
}
trap end EXIT
for _ in 1 2 3 4; do
  (while kill -0 "$$"; do :; done) & # not for longer than this script, however it ends
  loops+=($!)
done

# seeds FILE prints the seeds in the output of a run.
seeds() { grep -oiE 'seeds?( from)?[ =:]+[0-9]+' "$1" | grep -oE '[0-9]+$' | sort -u | paste -sd' ' || true; }

# lane FIRST runs every run from FIRST on that is ABREAST further than the one before.
lane() {
  local run start result failed=0
  for ((run = $1; run <= runs; run += abreast)); do
    kill -0 "$$" 2>/dev/null || return 1 # not for longer than this script
    start=$SECONDS result=passed
    hack/test.sh >"$logs/$run" 2>&1 || result=FAILED
    echo "run $run: $result in $((SECONDS - start))s; seeds: $(seeds "$logs/$run")"
    [ "$result" = passed ] || { failed=1 && tail -n 40 "$logs/$run"; }
  done
  return "$failed"
}

failed=0
for ((first = 1; first <= abreast; first++)); do
  lane "$first" &
  lanes+=($!)
done
for lane in "${lanes[@]}"; do
  wait "$lane" || failed=1
done
exit "$failed"
