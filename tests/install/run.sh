#!/usr/bin/env bash
# Installs a build tree into a scratch folder and builds programs outside the tree against it, by CMake's find_package and
# by pkg-config, in C99 and C++. Then runs them on an index.
# usage: run.sh BUILD_DIR SOURCE_DIR INDEX.sqz
set -euo pipefail
build=$1 source=$2 index=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
for component in runtime dev; do
  cmake --install "$build" --prefix "$scratch/usr" --component "$component" >/dev/null
done
# build FOLDER NAME OPTION...
build() {
  cmake -G Ninja -S "$1" -B "$scratch/$2" -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH="$scratch/usr" "${@:3}" >/dev/null
  cmake --build "$scratch/$2" >/dev/null
}
build "$source/tests/install/consumer" consumer -DEXAMPLES="$source/examples"
"$scratch/consumer/consumer_c" "$index"
"$scratch/consumer/consumer_cc" "$index"

# The command in embed_c.c's own comment, as it stands there.
export PKG_CONFIG_PATH=$(dirname "$(find "$scratch/usr" -name sqz.pc)")
export LD_LIBRARY_PATH=$(dirname "$(find "$scratch/usr" -name 'libsqz.so')")
command=$(sed -n 's/^ \*   \(cc .*\)$/\1/p' "$source/examples/embed_c/embed_c.c")
[ -n "$command" ] || { echo "FAILED: embed_c.c has no line 'cc ...'" >&2; exit 1; }
cp "$source/examples/embed_c/embed_c.c" "$scratch"
cp "$index" "$scratch/book.sqz"
(cd "$scratch" && bash -euc "$command")
