#!/bin/sh
# Installs the programs to which the benchmark compares Sluice, and those that
# check the benchmark. For Debian and its derivatives; needs root. It starts no
# service: the benchmark runs every program itself, in network namespaces.
set -eu

packages="haproxy nginx libnginx-mod-stream wrk iperf3 ipvsadm iptables"

missing=""
for package in $packages; do
	if ! dpkg-query -W -f='${Status}' "$package" 2>/dev/null | grep -q 'install ok installed'; then
		missing="$missing $package"
	fi
done
if [ -z "$missing" ]; then
	echo "all there: $packages"
	exit 0
fi

# The packages start their services when they are installed; exit status 101
# of this file forbids it. A file that is there already is left alone.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
	trap 'rm -f "$policy"' EXIT
	printf '#!/bin/sh\nexit 101\n' >"$policy"
	chmod 755 "$policy"
fi

apt-get update
# shellcheck disable=SC2086 # a list of words on purpose
DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $missing
