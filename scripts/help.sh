# Reads what make_help wrote. Sourced.

# help_of HELP [COMMAND]: what the tool says with [COMMAND] --help.
help_of() { awk -v command="${2-}" '/^@/ { on = /^@help / && $3 == command; next } on' "$1"; }

commands_of() { sed -n 's/^@help [^ ]* //p' "$1"; }

# options_of HELP [COMMAND]
options_of() { help_of "$@" | grep -oE '^  -[^ ]*' | grep -oE -- '--?[a-z][a-z-]*'; }
