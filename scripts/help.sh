# Shared by make_man, make_cli and make_completion: what a tool's --help names. Sourced.

commands_of() { "$1" --help | awk '/^Subcommands:/ { on = 1; next } /^$/ { on = 0 } on { print $1 }'; }

# options_of TOOL [COMMAND]
options_of() { "$@" --help | grep -oE '^  -[^ ]*' | grep -oE -- '--?[a-z][a-z-]*'; }
