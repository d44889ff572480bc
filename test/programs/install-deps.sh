#!/usr/bin/env bash
# Installs the Debian packages of the programs that test/programs puts behind
# Services (pgbench is a part of postgresql) and in front of them, of those to which it gives records, and of
# those by which a developer finds Services.
set -euo pipefail
cd "$(dirname "$0")"
../install-packages.sh postgresql:postgresql redis-server:redis-server redis-tools \
  nginx-light:nginx haproxy:haproxy mosquitto:mosquitto mosquitto-clients \
  logrotate rsyslog:rsyslog systemd curl bind9-dnsutils dbus-daemon

# systemd-resolved is not installed, only unpacked: its package takes /etc/resolv.conf over.
resolved=../../.cache/systemd-resolved
if [ ! -e $resolved/lib/systemd/systemd-resolved ]; then
  rm -rf $resolved.new
  mkdir -p $resolved.new/packages
  [ "$(id -u)" != 0 ] || apt-get update -qq
  (cd $resolved.new/packages && apt-get download -qq systemd-resolved libsystemd-shared)
  for package in $resolved.new/packages/*.deb; do dpkg -x "$package" $resolved.new; done
  rm -rf $resolved $resolved.new/packages
  mv $resolved.new $resolved
fi
