# Shared by scripts/demo and scripts/test: install what is missing, configure, build.
# Sourced, with the checkout as working directory.

jobs=$(nproc)

say() { printf '\n== %s\n' "$*"; }

# install_packages HEADING...: installs the packages below these headings of scripts/packages.txt that are missing.
# Asks nothing, needs no network if none is missing.
install_packages() {
  local wanted missing sudo=
  wanted=$(awk -v headings=" $* " '/^# [A-Z]/ { on = index(headings, " " $2 " ") } on && !/^#/' scripts/packages.txt)
  missing=$(for p in $wanted; do
    dpkg-query -W -f='${Status}' "$p" 2>/dev/null | grep -q '^install ok installed' || echo "$p"
  done)
  [ -z "$missing" ] && return 0
  if ! command -v apt-get >/dev/null; then
    echo "This script installs Debian packages, and there is no apt-get here. Please install:" >&2
    echo "$missing" >&2
    return 1
  fi
  [ "$(id -u)" = 0 ] || sudo=sudo
  say "Installing" $missing
  $sudo apt-get update -qq
  # A machine that is thrown away after the tests need not sync each file.
  DEBIAN_FRONTEND=noninteractive $sudo apt-get install -y -qq --no-install-recommends \
    ${CI:+-o Dpkg::Options::=--force-unsafe-io} $missing >build/apt.log 2>&1 || { tail -20 build/apt.log >&2; return 1; }
}

# The layout of files that differ from the main branch; of all files where CI is set.
check_formatting() {
  local base files
  if [ -n "${CI:-}" ] || ! base=$(git merge-base HEAD origin/main 2>/dev/null); then
    files=$(git ls-files 2>/dev/null || find . -path ./build -prune -o -type f -print)
  else
    files=$(git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard)
  fi
  { grep -E '\.(h|hpp|cc|c|cu|cuh)$' <<<"$files" || true; } |
    xargs -r -P "$jobs" -n 40 clang-format --dry-run -Werror
}

# configure PRESET [CMAKE OPTION...]
configure() {
  cmake --preset "$@" >"build/$1.configure.log" 2>&1 || { tail -30 "build/$1.configure.log" >&2; return 1; }
}

# build PRESET [TARGET...]: configures once, builds what changed.
build() {
  local preset=$1; shift
  [ -e "build/$preset/build.ninja" ] || configure "$preset"
  say "Building (preset $preset)"
  cmake --build "build/$preset" -j "$jobs" ${1:+--target "$@"}
}
