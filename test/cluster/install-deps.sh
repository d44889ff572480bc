#!/usr/bin/env bash
# Installs the Debian packages that the tests with a control plane need: Prometheus
# reads the metrics as in a cluster.
exec "$(dirname "$0")/../install-packages.sh" prometheus:prometheus
