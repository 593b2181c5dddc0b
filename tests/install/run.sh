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

pc=$(dirname "$(find "$scratch/usr" -name sqz.pc)")
flags=$(PKG_CONFIG_PATH=$pc pkg-config --cflags --libs sqz)
cc -std=c99 -Wall -Wextra -Werror -pedantic "$source/examples/embed_c/embed_c.c" $flags -lm -o "$scratch/embed_c"
export LD_LIBRARY_PATH=$(dirname "$(find "$scratch/usr" -name 'libsqz.so')")
"$scratch/embed_c" "$index" | tee "$scratch/embed_c.out"

# examples/embed as a project of its own.
[ -e /usr/include/boost/program_options.hpp ] || { echo "examples/embed: no Boost here"; exit 0; }
cmake -G Ninja -S "$source/examples/embed" -B "$scratch/embed" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/usr" >/dev/null
cmake --build "$scratch/embed" >/dev/null
read -r heads dim < <(sed -n 's/.*, \([0-9]*\) query heads, .* d = \([0-9]*\).*/\1 \2/p' "$scratch/embed_c.out")
seq $((heads * dim)) | "$scratch/embed/embed" "$index" --selector dense
