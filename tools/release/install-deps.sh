#!/usr/bin/env bash
# Installs the Debian packages that the tests of releases need: containerd and runc run
# the image, systemd checks the unit.
exec "$(dirname "$0")/../../test/install-packages.sh" containerd:containerd runc iproute2 systemd
