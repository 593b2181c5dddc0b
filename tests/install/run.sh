#!/usr/bin/env bash
# Installs a build tree into a scratch folder and builds programs outside the tree against it: with
# CMake's find_package and with pkg-config, in C99 and C++; then runs them on an index. examples/embed is one of them.
# usage: run.sh BUILD_DIR SOURCE_DIR INDEX.sqz
set -euo pipefail
build=$1 source=$2 index=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/usr" --component runtime >/dev/null
cmake --install "$build" --prefix "$scratch/usr" --component dev >/dev/null

cmake -G Ninja -S "$source/tests/install/consumer" -B "$scratch/consumer" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/usr" -DEXAMPLES="$source/examples" >/dev/null
cmake --build "$scratch/consumer" >/dev/null
"$scratch/consumer/consumer_c" "$index"
"$scratch/consumer/consumer_cc" "$index"

# The command in embed_c.c's own comment, as it stands there; and once more with every warning.
export PKG_CONFIG_PATH=$(dirname "$(find "$scratch/usr" -name sqz.pc)")
export LD_LIBRARY_PATH=$(dirname "$(find "$scratch/usr" -name 'libsqz.so')")
cc -std=c99 -Wall -Wextra -Werror -pedantic -c "$source/examples/embed_c/embed_c.c" \
  $(pkg-config --cflags sqz) -o "$scratch/embed_c.o"
command=$(sed -n 's/^ \*   \(cc .*\)$/\1/p' "$source/examples/embed_c/embed_c.c")
[ -n "$command" ] || { echo "FAILED: embed_c.c has no line 'cc ...'" >&2; exit 1; }
cp "$source/examples/embed_c/embed_c.c" "$scratch"
cp "$index" "$scratch/book.sqz"
(cd "$scratch" && bash -euc "$command") | tee "$scratch/embed_c.out"

# libruntime alone says nothing of the tools that it does not bring.
cmake -G Ninja -S "$source" -B "$scratch/alone" -DSQZ_RUNTIME_ONLY=ON -DSQZ_TESTS=OFF >/dev/null
grep -q /doc/libsqz0.2 "$scratch/alone/cmake_install.cmake"
if grep -q sqz-tools "$scratch/alone/cmake_install.cmake"; then
  echo "FAILED: a runtime-only tree installs something of sqz-tools" >&2
  exit 1
fi

# examples/embed as a project of its own.
[ -e /usr/include/boost/program_options.hpp ] || { echo "examples/embed: no Boost here"; exit 0; }
cmake -G Ninja -S "$source/examples/embed" -B "$scratch/embed" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/usr" >/dev/null
cmake --build "$scratch/embed" >/dev/null
read -r heads dim < <(sed -n 's/.*, \([0-9]*\) query heads, .* d = \([0-9]*\).*/\1 \2/p' "$scratch/embed_c.out")
seq $((heads * dim)) | "$scratch/embed/embed" "$index" --selector dense
