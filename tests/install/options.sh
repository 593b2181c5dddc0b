#!/usr/bin/env bash
# Every option that takes a number refuses NaN, or a whole number that is too large: exit code 2, and one line that names
# the option and what it found.
# usage: options.sh TOOL...
set -euo pipefail
checked=0 failed=
for tool in "$@"; do
  common='^$'  # once a tool
  for command in $("$tool" --help | sed -n '/^Subcommands:/,/^$/s/^  \([a-z]\+\) .*/\1/p') ''; do
    [ -n "$command" ] || [ "$common" = '^$' ] || continue
    while read -r option type; do
      value=99999999999999999999
      [[ $type = INT || $type = UINT || $type = N || $type = LAYER ]] || value=nan
      code=0
      said=$("$tool" $command "$option=$value" 2>&1) || code=$?
      first=${said%%$'\n'*}
      if [ $code != 2 ] || [[ $first != *"$option"*"$value"* ]] || [ ${#first} -gt 200 ]; then
        echo "FAILED: $(basename "$tool") $command $option=$value: exit code $code: $first" >&2
        failed=1
      fi
      checked=$((checked + 1))
    done < <("$tool" $command --help | grep -oE '^  (-[a-z],)?--[a-z0-9-]+ (N|X|S|LAYER|INT|UINT|FLOAT)\b' |
      grep -oE -- '--[a-z0-9-]+ .*' | grep -vE -- "$common")
    common='^--(seed|threads) '
  done
done
echo "$checked options"
[ $checked -gt 80 ] && [ -z "$failed" ]
