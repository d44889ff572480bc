package conntrack

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/service"
)

// annotation selects which records of a Service the access log gets, without the
// prefix sluice.dev/.
const annotation = "access-log"

// Values of the annotation that leave out records.
const (
	logFailed = "failed"
	logOff    = "off"
)

// CheckAnnotation returns what is wrong with the value of an annotation of a Service,
// without the prefix sluice.dev/; nil for names that are not known here.
func CheckAnnotation(name, value string) error {
	if name != annotation || slices.Contains(service.AccessLogValues, value) {
		return nil
	}
	return fmt.Errorf("%q is not one of %s", value, strings.Join(service.AccessLogValues, ", "))
}

// failedShare is how many records of connections with a failed attempt are written
// for each one of the rate: these are why somebody reads the log.
const failedShare = 10

// rate bounds the lines of a second. It belongs to the holder of Log.lock.
type rate struct {
	most   int       // 0: no bound
	begin  time.Time // of the current second
	lines  int       // of any kind, in this second
	failed int       // of those, lines above most
	left   report    // out of the log
}

// admit reports whether a record gets a line.
func (l *Log) admit(r *Record) bool {
	failed := len(r.Failed) > 0 || !r.Connected
	if r.Port != nil && r.Port.Annotations != nil {
		switch r.Port.Annotations[annotation] {
		case logOff:
			return false
		case logFailed:
			if !failed {
				return false
			}
		}
	}
	b := &l.rate
	if b.most == 0 {
		return true
	}
	now := l.now()
	if now.Sub(b.begin) >= time.Second || now.Before(b.begin) {
		b.begin, b.lines, b.failed = now, 0, 0
	}
	admitted := true
	switch {
	case b.lines < b.most:
		b.lines++
	case failed && b.failed < failedShare*b.most:
		b.failed++
	default:
		admitted = false
		l.left.Add(1)
		b.left.unsaid++
	}
	if b.left.unsaid > 0 { // perhaps of a minute ago
		if n, ok := b.left.due(now, 0); ok {
			l.tellLeft(n)
		}
	}
	return admitted
}

func (l *Log) tellLeft(n uint64) {
	l.logger.Warn().Uint64("records", n).Int("a_second", l.rate.most).
		Msg("more connections end than --access-log-rate allows: records are left out; sluice_access_log_lines_left_out_total counts them")
}
