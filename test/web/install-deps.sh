#!/usr/bin/env bash
# Installs Debian's chromium, and a font for it, if they are missing.
set -euo pipefail
exec "$(dirname "$0")/../install-packages.sh" chromium fonts-dejavu-core
