#!/usr/bin/env bash
# Installs a build tree into a scratch folder and builds programs outside the tree against it: with
# CMake's find_package and with pkg-config, in C99 and C++; then runs them on an index.
# usage: run.sh BUILD_DIR SOURCE_DIR INDEX.sqz
set -euo pipefail
build=$1 source=$2 index=$3
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
cmake --install "$build" --prefix "$scratch/usr" --component runtime >/dev/null
cmake --install "$build" --prefix "$scratch/usr" --component dev >/dev/null

cmake -S "$source/tests/install/consumer" -B "$scratch/consumer" -DCMAKE_BUILD_TYPE=Release \
  -DCMAKE_PREFIX_PATH="$scratch/usr" -DEXAMPLES="$source/examples" >/dev/null
cmake --build "$scratch/consumer" >/dev/null
"$scratch/consumer/consumer_c" "$index"
"$scratch/consumer/consumer_cc" "$index"

pc=$(dirname "$(find "$scratch/usr" -name sqz.pc)")
flags=$(PKG_CONFIG_PATH=$pc pkg-config --define-variable=prefix="$scratch/usr" --cflags --libs sqz)
cc -std=c99 -Wall -Wextra -Werror -pedantic "$source/examples/embed_c/embed_c.c" $flags -lm -o "$scratch/embed_c"
LD_LIBRARY_PATH=$(dirname "$(find "$scratch/usr" -name 'libsqz.so')") "$scratch/embed_c" "$index"

library=$(find "$scratch/usr" -name 'libsqz.so')
echo "needs:"; readelf -d "$library" | sed -n 's/.*NEEDED.*\[\(.*\)\]/  \1/p'
if readelf -d "$library" | grep NEEDED | grep -vE 'libstdc\+\+|libm\.|libc\.|libgcc_s|ld-linux'; then
  echo "libsqz.so needs more than the C++ library" >&2
  exit 1
fi
if nm -D --defined-only "$library" | awk '{print $3}' | grep -v '^sqz_'; then
  echo "libsqz.so exports symbols that do not begin with sqz_" >&2
  exit 1
fi
