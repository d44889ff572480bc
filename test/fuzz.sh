#!/usr/bin/env bash
# Runs each fuzz target on one CPU, one target per CPU at a time. The tests of a package are
# compiled once for all its targets. What the fuzzer finds is kept where `go test -fuzz` keeps it.
#
#   test/fuzz.sh 5s
#
# `go test -fuzz` guides the fuzzer by the branches of all packages; this does by those of
# Sluice. The libraries' normal build is used then, and some 10 to 80 times as many inputs are
# tried in the same time. SLUICE_TEST_FULL=1 guides by all, for runs of minutes.
set -euo pipefail
cd "$(dirname "$0")/.."
MODULE=$(go list -m)
export FUZZTIME=$1 OUT=$PWD/.cache/fuzz CACHE=$(go env GOCACHE)/fuzz/$MODULE
export GUIDE=-gcflags=$MODULE/...=-d=libfuzzer
[ -z "${SLUICE_TEST_FULL:-}" ] || GUIDE=-fuzz=.
mkdir -p "$OUT"

# fuzz DIRECTORY TARGET...
# Minimizing an input is bounded: it takes up to a minute otherwise. If the time ends while
# the fuzzer minimizes or stops, it fails with "context deadline exceeded" and names no input
# (golang/go#75804): such a run is repeated, twice at most.
fuzz() {
  local dir=$1 program said status result=0 target try
  program=$OUT/${dir//\//-}.test
  shift
  go test -c "$GUIDE" -o "$program" "./$dir" || { echo "== $dir does not compile"; return 1; }
  for target; do
    for try in 1 2 3; do
      status=0
      said=$(cd "$dir" && "$program" -test.run '^$' -test.fuzz "^$target\$" -test.fuzztime "$FUZZTIME" \
        -test.fuzzminimizetime 10x -test.parallel 1 -test.fuzzcachedir "$CACHE/$dir" 2>&1) || status=1
      case "$status $said" in
      1*"Failing input"*) break ;;
      1*"context deadline exceeded"*) [ "$try" = 3 ] || echo "== $dir $target: golang/go#75804, again" ;;
      *) break ;;
      esac
    done
    printf '== %s %s\n%s\n' "$dir" "$target" "$said"
    [ "$status" = 0 ] || result=1
  done
  return "$result"
}
export -f fuzz

grep -rnE --include='*_test.go' '^func Fuzz' . |
  sed -E 's|^\./(.*)/[^/]*_test.go:[0-9]+:func (Fuzz[A-Za-z0-9_]*).*|\1 \2|' | sort |
  awk '$1 != last { printf "%s%s", last ? "\n" : "", last = $1 } { printf " %s", $2 } END { print "" }' |
  xargs -P "$(nproc)" -L 1 bash -c 'fuzz "$@"' fuzz
