#!/usr/bin/env bash
# Puts a newer HAProxy than this release of Debian has into a folder, with the
# libraries that it needs, and prints its path: haproxy.sh DIR. The packages come
# from Debian's suite forky and are checked by its signature; the machine's own
# packages stay as they are.
set -euo pipefail
dir=$(realpath -m "$1")
program=$dir/usr/sbin/haproxy
if [ -x "$program" ]; then echo "$program"; exit 0; fi
suite=forky
packages="haproxy libc6 libgcc-s1 libstdc++6 libcrypt1 libjemalloc2 liblua5.4-0
  libopentracing-c-wrapper0t64 libopentracing1 libpcre2-8-0 libssl3t64 libzstd1 zlib1g"

command -v patchelf > /dev/null || DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends patchelf > /dev/null 2>&1
rm -rf "$dir"
mkdir -p "$dir/apt/lists/partial"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" > "$dir/apt/list"
apt=(apt-get -q -o "Dir::Etc::sourcelist=$dir/apt/list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$dir/apt/lists"
  -o "Dir::Cache=$dir/apt" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root)
"${apt[@]}" update > /dev/null
cd "$dir/apt"
# shellcheck disable=SC2086
"${apt[@]}" download $packages > /dev/null
for deb in *.deb; do dpkg -x "$deb" "$dir"; done
rm -r "$dir/apt"

libs=$(find "$dir" -name '*.so*' -printf '%h\n' | sort -u | paste -sd:)
loader=$(find "$dir" -name 'ld-linux-x86-64.so.2' -print -quit)
patchelf --set-interpreter "$loader" --set-rpath "$libs" --force-rpath "$program"
"$program" -v > /dev/null
echo "$program"
