#!/usr/bin/env bash
# Runs a fuzz target on its seeds, then for $SQZ_FUZZ_SECONDS (default 0: seeds only) on mutations. What it finds on
# the way to new code is kept in $SQZ_FUZZ_CORPUS/TARGET, or nowhere; inputs that fail go to the working directory.
# usage: run.sh TARGET SEED_DIR [DICTIONARY]
set -euo pipefail
target=$1 seeds=$2 dictionary=${3:+-dict=$(dirname "$0")/dictionaries/$3.dict} seconds=${SQZ_FUZZ_SECONDS:-0}
limits="-timeout=20 -rss_limit_mb=2048"
export ASAN_OPTIONS=max_allocation_size_mb=256${ASAN_OPTIONS:+:$ASAN_OPTIONS}  # no input is larger than a few KB
"$target" "$seeds"/* $limits
[ "$seconds" -gt 0 ] || exit 0
if [ -n "${SQZ_FUZZ_CORPUS:-}" ]; then
  corpus=$SQZ_FUZZ_CORPUS/$(basename "$target")
  mkdir -p "$corpus"
else
  corpus=$(mktemp -d)
  trap 'rm -rf "$corpus"' EXIT
fi
"$target" "$corpus" "$seeds" -max_total_time="$seconds" $limits $dictionary -print_final_stats=1
