#!/usr/bin/env bash
# docs/cli.md is what scripts/make_cli prints of what the tools say with --help.
# usage: cli.sh SOURCE_DIR HELP...
set -euo pipefail
source=$1; shift
if ! "$source/scripts/make_cli" "$@" | diff -u "$source/docs/cli.md" -; then
  echo "FAILED: docs/cli.md says something else than --help; make it again: scripts/make_cli $* >docs/cli.md" >&2
  exit 1
fi
