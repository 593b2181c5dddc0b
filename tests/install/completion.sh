#!/usr/bin/env bash
# bash completes every command and option that --help names, and leaves the rest to file names.
# usage: completion.sh HELP COMPLETION
set -euo pipefail
help=$1
name=$(basename "$help")
. "$(dirname "$0")/../../scripts/help.sh"
# shellcheck source=/dev/null
. "$2"
fail() { echo "FAILED: $*" >&2; exit 1; }
complete -p "$name" | grep -q -- "-o default -F _${name//-/_} $name" || fail "$name is not completed"
offered() {  # WORD...: what is offered for the last one
  COMP_WORDS=("$name" "$@") COMP_CWORD=$#
  "_${name//-/_}"
  echo "${COMPREPLY[@]}"
}
commands=$(help_of "$help" | awk '/^Subcommands:/ { on = 1; next } /^$/ { on = 0 } on { print $1 }')
checked=0
for command in "" $commands; do
  [ -z "$command" ] || [ "$(offered "$command")" = "$command" ] || fail "command $command"
  # shellcheck disable=SC2086  # no command: no argument
  for option in $(help_of "$help" "$command" | grep -oE '^  -[^ ]*' | grep -oE -- '--[a-z-]+'); do
    [[ " $(offered $command "$option") " == *" $option "* ]] || fail "$command $option"
    checked=$((checked + 1))
  done
done
[ "$checked" -gt 2 ] || fail "only $checked options were found in --help"
[ -z "$(offered ${commands:+info} book.sq)" ] || fail "a file name"
echo "$checked options"
