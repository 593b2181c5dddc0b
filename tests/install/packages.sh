#!/usr/bin/env bash
# Makes the Debian packages of a build tree, looks into them, installs them into a root folder of their own, uses what was
# installed, and removes it again. Exit code 77: cannot be done here.
# usage: packages.sh BUILD_DIR SOURCE_DIR INDEX.sqz
set -euo pipefail
build=$(realpath "$1") source=$(realpath "$2") index=$(realpath "$3")
for needed in cpack dpkg dpkg-deb dpkg-shlibdeps file; do
  command -v "$needed" >/dev/null || { echo "skipped: no $needed here"; exit 77; }
done
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
fail() { echo "FAILED: $*" >&2; exit 1; }

(cd "$build" && cpack -G DEB -B "$scratch/packages") >"$scratch/cpack.log" 2>&1 ||
  { tail -20 "$scratch/cpack.log" >&2; fail "cpack"; }
file_of() { echo "$scratch/packages/$1"_*.deb; }
field() { dpkg-deb -f "$(file_of "$1")" "$2"; }

version=$(field libsqz0.2 Version) runtime=$(field libsqz0.2 Depends)
[[ $runtime =~ libc6 && ! $runtime =~ torch|hdf5|blas|gomp|spdlog ]] || fail "libsqz0.2 depends on: $runtime"
[ "$(field libsqz-dev Depends)" = "libsqz0.2 (= $version)" ] || fail "libsqz-dev: $(field libsqz-dev Depends)"
dpkg-deb -I "$(file_of libsqz0.2)" shlibs | grep -q '^libsqz 0.2 libsqz0.2' || fail "shlibs"
packages=(libsqz0.2 libsqz-dev)
if [ -e "$(file_of sqz-tools)" ]; then
  packages+=(sqz-tools)
  [[ $(field sqz-tools Depends) =~ libsqz0.2\ \(=\ $version\) ]] || fail "sqz-tools depends on: $(field sqz-tools Depends)"
fi

[ "$(id -u)" = 0 ] || { echo "packages are right; not installed: only root can"; exit 0; }
root=$scratch/root
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} "$scratch/bin"
touch "$root/var/lib/dpkg/status"
ln -s /bin/true "$scratch/bin/ldconfig"  # the machine's own stays as it is
run_dpkg() {
  PATH=$scratch/bin:$PATH dpkg --root="$root" --force-depends --force-script-chrootless --force-unsafe-io "$@" \
    >"$scratch/dpkg.log" 2>&1 || { cat "$scratch/dpkg.log" >&2; fail "dpkg $*"; }
}
for package in "${packages[@]}"; do run_dpkg -i "$(file_of "$package")"; done

export LD_LIBRARY_PATH=$root/usr/lib
if [ -x "$root/usr/bin/sqz-index" ]; then
  "$root/usr/bin/sqz-index" verify -q "$index" >/dev/null || fail "sqz-index verify"
fi
flags=$(PKG_CONFIG_PATH=$root/usr/lib/pkgconfig pkg-config --cflags --libs sqz)
cc -std=c99 "$root/usr/share/doc/libsqz-dev/examples/embed_c/embed_c.c" $flags -lm -o "$scratch/embed_c"
"$scratch/embed_c" "$index" >/dev/null || fail "embed_c"

run_dpkg -P "${packages[@]}"
left=$(find "$root" -path "$root/var" -prune -o -not -type d -print)
[ -z "$left" ] || fail "left behind: $left"
echo "packages of $version: made, installed, used and removed"
