#!/usr/bin/env bash
# Builds the wheel as a user does, lets auditwheel check its name, installs it into a fresh virtual environment and
# runs the tests of the module there. Exit code 77: the tools of PyPI cannot be had.
# usage: wheel.sh SOURCE_DIR PYTHON CUDA WERROR
set -euo pipefail
source=$1 python=$2 cuda=$3 werror=$4
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

"$python" -m venv "$scratch/tools" || { echo "skipped: $python makes no virtual environments"; exit 77; }
"$scratch/tools/bin/pip" install -q --retries 1 --timeout 20 scikit-build-core auditwheel >"$scratch/pip.log" 2>&1 ||
  { tail -1 "$scratch/pip.log"; echo "skipped: scikit-build-core and auditwheel cannot be had from PyPI"; exit 77; }
PATH=$scratch/tools/bin:$PATH

# The folder lies as build/cpu does, so that ccache finds what was compiled there.
pip wheel -q "$source" --config-settings=build-dir="$source/build/wheel" --no-deps --no-build-isolation -w "$scratch" --config-settings=cmake.define.SQZ_CUDA="$cuda" \
  --config-settings=cmake.define.SQZ_WERROR="$werror"
version=$(sed -n 's/^project(sqz VERSION \([0-9.]*\).*/\1/p' "$source/CMakeLists.txt")
wheel=$scratch/sqz_attention-$version-py3-none-manylinux_2_34_x86_64.whl
[ -e "$wheel" ] || fail "expected $(basename "$wheel"), found $(cd "$scratch"; echo *.whl)"
auditwheel show "$wheel" >"$scratch/show"
# What it needs is no newer than its name says, and nothing but the system's C and C++ libraries.
grep -qE 'platform tag: *"manylinux_2_(2[0-9]|3[0-4])_x86_64"' <(tr '\n' ' ' <"$scratch/show") ||
  { cat "$scratch/show"; fail "not manylinux_2_34"; }
[ "$(stat -c %s "$wheel")" -lt 100000000 ] || fail "$(stat -c %s "$wheel") bytes, expected less than 100 MB"
python -m zipfile -e "$wheel" "$scratch/unpacked"
needed=$(readelf -d "$scratch/unpacked/sqz/libsqz.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | tr '\n' ' ')
[[ $needed =~ ^((libstdc\+\+|libm|libgcc_s|libc|ld-linux-x86-64)\.so\.[0-9]+ )+$ ]] || fail "libsqz.so needs $needed"

# Debian's numpy and pytest, our wheel.
"$python" -m venv --system-site-packages "$scratch/fresh"
"$scratch/fresh/bin/pip" install -q --no-deps --no-index "$wheel"
cd "$scratch"  # away from the checkout
unset SQZ_LIBRARY
"$scratch/fresh/bin/python" -c 'import sqz; print(sqz.__file__)' | grep -q "^$scratch/fresh/" || fail "another sqz is imported"
"$scratch/fresh/bin/python" -m pytest -q -p no:cacheprovider -c /dev/null --rootdir="$source" "$source/tests/python" \
  --ignore="$source/tests/python/test_types.py"
"$scratch/fresh/bin/pip" uninstall -q -y sqz-attention
[ -z "$(find "$scratch/fresh" -path '*/sqz*' -not -path '*/__pycache__*')" ] || fail "the wheel leaves files behind"
grep -m 1 -A 1 "is consistent" "$scratch/show"
