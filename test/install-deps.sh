#!/usr/bin/env bash
# Installs the Debian packages that the tests need, if any of them is missing.
# Root installs them; for other users it prints which ones to install. It does
# nothing if all are installed.
set -euo pipefail

# What to look for, and the package that contains it.
needs=(
  "gcc gcc"             # the race detector links with it
  "make make"
  "nft nftables"        # the tests compare its dumps; sluice itself needs no nft
  "ip iproute2"         # the same
  "iptables iptables"   # redirect/iptables steers by it, in both variants
  "ipset ipset"         # the same
  "jq jq"               # commands of docs/observing.md
  "curl curl"           # the same
  "dnsmasq dnsmasq-base" # a DNS server of Debian's behind a Service
  "linux.uml user-mode-linux" # test/vm: a kernel without netfilter
  "clang-14 clang-14"   # compiles flow/bpf; another version gives other objects
  "llvm-strip-14 llvm-14" # the same
)
files=(
  "/usr/include/stdlib.h libc6-dev" # the race detector
  "/usr/include/bpf/bpf_helpers.h libbpf-dev" # flow/bpf
  "/usr/include/usrsctp.h libusrsctp-dev" # SCTP peers: this kernel may have none
)

PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin
packages=()
for need in "${needs[@]}"; do
  command -v "${need%% *}" >/dev/null || packages+=("${need##* }")
done
for file in "${files[@]}"; do
  [ -e "${file%% *}" ] || packages+=("${file##* }")
done
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "install-deps: please install: ${packages[*]}" >&2
  exit 1
fi
echo "install-deps: installing ${packages[*]}"
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
