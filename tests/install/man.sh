#!/usr/bin/env bash
# Every option that --help names, of every command, is in the manual page, and the page is sound.
# usage: man.sh HELP PAGE.1
set -euo pipefail
help=$1 page=$2
. "$(dirname "$0")/../../scripts/help.sh"
fail() { echo "FAILED: $page: $*" >&2; exit 1; }
plain=$(sed 's/\\-/-/g; s/\\e/\\/g; s/^\\&//' "$page")
commands=$(help_of "$help" | awk '/^Subcommands:/ { on = 1; next } /^$/ { on = 0 } on { print $1 }')
checked=0
for command in "" $commands; do
  for option in $(help_of "$help" "$command" | grep -oE '^  [^ ]+' | grep -oE -- '--[a-z-]+'); do
    grep -qE -- "^\.B .*$option( |,|$|\{)" <<<"$plain" || fail "$command $option is missing"
    checked=$((checked + 1))
  done
  [ -z "$command" ] || grep -q "^.SH \"COMMAND ${command^^}\"" <<<"$plain" || fail "no $command"
done
[ "$checked" -gt 10 ] || fail "only $checked options were found in --help"
for part in NAME SYNOPSIS EXAMPLES "EXIT STATUS"; do
  grep -qE "^\.SH \"?$part\"?$" "$page" || fail "no section $part"
done
bad=$(grep -E "^[.']" "$page" | grep -vE '^\.(\\"|TH|SH|SS|TP|PP|B|nf|fi)( |$)') && fail "macro: $bad"
if command -v groff >/dev/null; then
  warnings=$(groff -man -ww -Tutf8 "$page" 2>&1 >/dev/null)
  [ -z "$warnings" ] || fail "$warnings"
fi
echo "$checked options"
