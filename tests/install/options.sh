#!/usr/bin/env bash
# Every option that takes a number with a fraction refuses NaN, which CLI11's own ranges take, and --seed what 64 bits do
# not hold: exit code 2, and one line that names the option and what it found.
# usage: options.sh TOOL...
set -euo pipefail
checked=0 failed=
for tool in "$@"; do
  common='^$'  # once a tool
  for command in $("$tool" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]\+\) .*/\1/p') ''; do
    [ -n "$command" ] || [ "$common" = '^$' ] || continue
    while read -r option type; do
      value=99999999999999999999
      [ $type = UINT ] || value=nan
      code=0
      said=$("$tool" $command "$option=$value" 2>&1) || code=$?
      first=${said%%$'\n'*}
      if [ $code != 2 ] || [[ $first != *"$option"*"$value"* ]] || [ ${#first} -gt 200 ]; then
        echo "FAILED: $(basename "$tool") $command $option=$value: exit code $code: $first" >&2
        failed=1
      fi
      checked=$((checked + 1))
    done < <("$tool" $command --help | grep -oE '^  (-[a-z],)?--[a-z0-9-]+ (X|S|UINT|FLOAT)\b' |
      grep -oE -- '--[a-z0-9-]+ .*' | grep -vE -- "$common")
    common='^--seed '
  done
done
echo "$checked options"
[ $checked -gt 20 ] && [ -z "$failed" ]
