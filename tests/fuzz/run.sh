#!/usr/bin/env bash
# Runs a fuzz target on its seeds, then for $SQZ_FUZZ_SECONDS (default 0: seeds only) on mutations.
# usage: run.sh TARGET SEED_DIR
set -euo pipefail
target=$1 seeds=$2 seconds=${SQZ_FUZZ_SECONDS:-0}
"$target" "$seeds"/* -rss_limit_mb=2048
if [ "$seconds" -gt 0 ]; then
  corpus=$(mktemp -d)
  trap 'rm -rf "$corpus"' EXIT
  "$target" "$corpus" "$seeds" -max_total_time="$seconds" -timeout=10 -rss_limit_mb=2048 \
    -print_final_stats=1
fi
