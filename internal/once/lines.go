package once

import "time"

// PerMinute is how many lines the log has about one subject in a minute.
const PerMinute = 100

// Lines bounds how much the log says about each of many subjects, so that one
// that changes all the time does not fill it. The zero value is ready. It is not
// safe for concurrent use.
type Lines struct {
	began time.Time      // of the minute
	said  map[string]int // by subject; at most Most
}

// Take reports whether there may be one more line about a subject in this minute, and
// whether it is the last one.
func (l *Lines) Take(subject string, now time.Time) (last, ok bool) {
	if l.said == nil || now.Sub(l.began) >= time.Minute || len(l.said) == Most {
		l.began, l.said = now, make(map[string]int)
	}
	if l.said[subject] == PerMinute {
		return false, false
	}
	l.said[subject]++
	return l.said[subject] == PerMinute, true
}
