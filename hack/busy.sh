#!/usr/bin/env bash
# busy.sh [N] runs hack/test.sh N times, by default ten, beside four busy loops, and prints a line for
# each run: its result, its seconds and the seeds that its tests have drawn. It fails if a run fails.
set -euo pipefail
cd "$(dirname "$0")/.."

logs="$(mktemp -d)"
loops=()
# shellcheck disable=SC2317 # the trap calls it
end() {
  kill "${loops[@]}"
  echo "what the runs printed: $logs"
}
trap end EXIT
for _ in 1 2 3 4; do
  (while kill -0 "$$"; do :; done) & # not for longer than this script, however it ends
  loops+=($!)
done

# seeds FILE prints the seeds in the output of a run.
seeds() { grep -oiE 'seeds?( from)?[ =:]+[0-9]+' "$1" | grep -oE '[0-9]+$' | sort -u | paste -sd' ' || true; }

failed=0
for ((run = 1; run <= ${1:-10}; run++)); do
  start=$SECONDS result=passed
  hack/test.sh >"$logs/$run" 2>&1 || result=FAILED
  [ "$result" = passed ] || failed=$((failed + 1))
  echo "run $run: $result in $((SECONDS - start))s; seeds: $(seeds "$logs/$run")"
  [ "$result" = passed ] || tail -n 40 "$logs/$run"
done
exit "$((failed > 0))"
