// Package amount writes durations and sizes for people, with at most three
// significant digits.
package amount

import (
	"strconv"
	"time"
)

// Duration is AppendDuration as a string.
func Duration(d time.Duration) string { return string(AppendDuration(nil, int64(d))) }

// Bytes is AppendBytes as a string.
func Bytes(n uint64) string { return string(AppendBytes(nil, n)) }

// AppendDuration writes a duration in ns with at most three significant digits:
// 85us, 1.24ms, 310ms, 12.3s, then 4m10s, 3h5m.
func AppendDuration(b []byte, ns int64) []byte {
	d := time.Duration(max(ns, 0))
	switch {
	case d < time.Millisecond:
		b = strconv.AppendInt(b, int64(d/time.Microsecond), 10)
		return append(b, "us"...)
	case d < time.Second:
		return append(appendThree(b, int64(d), int64(time.Millisecond)), "ms"...)
	case d < time.Minute:
		return append(appendThree(b, int64(d), int64(time.Second)), 's')
	case d < time.Hour:
		b = strconv.AppendInt(b, int64(d/time.Minute), 10)
		b = append(b, 'm')
		b = strconv.AppendInt(b, int64(d%time.Minute/time.Second), 10)
		return append(b, 's')
	}
	b = strconv.AppendInt(b, int64(d/time.Hour), 10)
	b = append(b, 'h')
	b = strconv.AppendInt(b, int64(d%time.Hour/time.Minute), 10)
	return append(b, 'm')
}

// AppendBytes writes a number of bytes: 78 B, 1.25 KiB, 3.1 MiB.
func AppendBytes(b []byte, n uint64) []byte {
	if n < 1<<10 {
		b = strconv.AppendUint(b, n, 10)
		return append(b, " B"...)
	}
	units := [...]string{" KiB", " MiB", " GiB", " TiB", " PiB", " EiB"}
	unit, i := uint64(1<<10), 0
	for i < len(units)-1 && n/unit >= 1<<10 {
		unit <<= 10
		i++
	}
	b = appendThree(b, int64(n>>1), int64(unit>>1))
	return append(b, units[i]...)
}

// appendThree writes n/unit, truncated to three digits, without trailing zeros in
// the fraction.
func appendThree(b []byte, n, unit int64) []byte {
	whole := n / unit
	b = strconv.AppendInt(b, whole, 10)
	digits := 2
	if whole >= 100 {
		digits = 0
	} else if whole >= 10 {
		digits = 1
	}
	rest := n % unit
	var fraction [2]byte
	used := 0
	for i := range digits {
		rest *= 10
		fraction[i] = byte('0' + rest/unit)
		rest %= unit
		if fraction[i] != '0' {
			used = i + 1
		}
	}
	if used > 0 {
		b = append(b, '.')
		b = append(b, fraction[:used]...)
	}
	return b
}
