#!/usr/bin/env bash
# Installs Debian packages, if any of them is missing: root installs them, for other
# users it prints which ones to install. It starts no services, and disables those of
# newly installed packages: the tests run the programs themselves.
#
#   test/install-packages.sh PACKAGE[:SERVICE] ...
set -euo pipefail

packages=() services=()
for need in "$@"; do
  package=${need%%:*}
  dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed' && continue
  packages+=("$package")
  [ "$need" = "$package" ] || services+=("${need#*:}")
done
[ ${#packages[@]} -gt 0 ] || exit 0

if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
  echo "install-deps: please install: ${packages[*]}" >&2
  exit 1
fi
exec 9<"$0"
flock 9 # steps of CI run side by side
echo "install-deps: installing ${packages[*]}"

# Exit status 101 of this file keeps packages from starting services. An existing
# file is not changed.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
  trap 'rm -f "$policy"' EXIT
  printf '#!/bin/sh\nexit 101\n' >"$policy"
  chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -y -qq --no-install-recommends "${packages[@]}" >/dev/null
for service in "${services[@]}"; do
  update-rc.d "$service" disable >/dev/null 2>&1 || true
  deb-systemd-helper disable "$service.service" >/dev/null 2>&1 || true
done
