#!/usr/bin/env bash
# Installs the Debian packages of the programs that test/programs puts behind
# Services (pgbench is a part of postgresql) and in front of them, and of those to which it gives records.
exec "$(dirname "$0")/../install-packages.sh" postgresql:postgresql redis-server:redis-server redis-tools \
  nginx-light:nginx haproxy:haproxy mosquitto:mosquitto mosquitto-clients \
  logrotate rsyslog:rsyslog systemd
