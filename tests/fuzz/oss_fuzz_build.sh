#!/usr/bin/env bash
# Builds the fuzz targets as OSS-Fuzz asks for them: with its compilers, flags and engine from $CC, $CXX, $CFLAGS,
# $CXXFLAGS and $LIB_FUZZING_ENGINE into $OUT, with seeds, dictionaries and the libraries that they need.
# Without its flags: OUT=/tmp/out CC=clang-14 CXX=clang++-14 tests/fuzz/oss_fuzz_build.sh
set -euo pipefail
: "${OUT:?the folder for the targets}" "${CC:=clang}" "${CXX:=clang++}" "${LIB_FUZZING_ENGINE:=-fsanitize=fuzzer}"
: "${CFLAGS:=-O1 -g1 -fsanitize=address,undefined}" "${CXXFLAGS:=$CFLAGS}"
export CC CXX CFLAGS CXXFLAGS
source=$(cd "$(dirname "$0")/../.." && pwd)
build=${WORK:-$(mktemp -d)}/sqz
# RPATH, unlike RUNPATH, also holds for what the libraries need.
cmake -S "$source" -B "$build" -G Ninja -DCMAKE_BUILD_TYPE=None -DSQZ_FUZZ=ON -DSQZ_FUZZ_ENGINE="$LIB_FUZZING_ENGINE" \
  -DSQZ_TOOLS=OFF -DSQZ_TRAINING=OFF -DSQZ_WERROR=OFF -DCMAKE_BUILD_RPATH='$ORIGIN/lib' \
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags
mkdir -p "$OUT/lib"
ctest --test-dir "$build" -N -V -R '_fuzz$' |
  sed -n 's/^[0-9]*: Test command: [^ ]*run.sh "\([^"]*\)" "\([^"]*\)"\( "\([^"]*\)"\)\?$/\1 \2 \4/p' |
  while read -r target seeds dictionary; do
    name=$(basename "$target")
    cmake --build "$build" --target "$name" </dev/null
    cp "$target" "$OUT/"
    (cd "$seeds" && python3 -m zipfile -c "$OUT/${name}_seed_corpus.zip" *)
    [ -z "$dictionary" ] || cp "$source/tests/fuzz/dictionaries/$dictionary.dict" "$OUT/$name.dict"
    ldd "$target" | sed -n 's/.* => \([^ ]*\) (.*/\1/p' |
      { grep -vE '/(libc|libm|libdl|librt|libpthread|libgcc_s|libstdc\+\+|libresolv)\.so' || true; } |
      xargs -r cp -Lt "$OUT/lib"
  done
