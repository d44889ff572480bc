// Package printable escapes strings from outside (names, annotations, paths,
// errors) in logs, HTTP answers, metrics and events. So they cannot move a
// terminal's cursor, change the direction of text, or forge a line of the program's
// output.
package printable

import (
	"io"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Text returns a sentence with unprintable characters escaped as in Go: control
// characters, those that change the direction of text, and invalid UTF-8. It
// returns a printable string unchanged.
func Text(s string) string {
	for i := range len(s) {
		if s[i] < ' ' || s[i] > '~' {
			return string(appendText(make([]byte, 0, len(s)+16), s))
		}
	}
	return s
}

// Lines is Text for a text of several lines. It keeps line breaks, so use it only
// for the program's own texts.
func Lines(s string) string {
	lines := strings.Split(s, "\n")
	for i, line := range lines {
		words := strings.Split(line, "\t")
		for j, word := range words {
			words[j] = Text(word)
		}
		lines[i] = strings.Join(words, "\t")
	}
	return strings.Join(lines, "\n")
}

func appendText(b []byte, s string) []byte {
	for len(s) > 0 {
		r, n := utf8.DecodeRuneInString(s)
		if r == utf8.RuneError && n == 1 || !strconv.IsPrint(r) {
			quoted := strconv.Quote(s[:n])
			b = append(b, quoted[1:len(quoted)-1]...)
		} else {
			b = append(b, s[:n]...)
		}
		s = s[n:]
	}
	return b
}

// Name returns a name for use inside a line. It quotes, as in Go, anything but the
// characters of names, paths and addresses, so that the result is always one word.
func Name(s string) string {
	if isName(s) {
		return s
	}
	return strconv.Quote(s)
}

// AppendName appends Name(s) to b.
func AppendName(b []byte, s string) []byte {
	if isName(s) {
		return append(b, s...)
	}
	return strconv.AppendQuote(b, s)
}

// isName reports whether a name needs no quotes.
func isName(s string) bool {
	for i := range len(s) {
		switch c := s[i]; c {
		case '"', '\'', '`', '\\', '|', ',', ';', '=', '<', '>':
			return false
		default:
			if c <= ' ' || c > '~' {
				return false
			}
		}
	}
	return true
}

// JSON escapes unprintable characters in JSON without blanks between tokens,
// because encoders do not escape most characters from U+007F on. It returns b
// itself if there is nothing to escape.
func JSON(b []byte) []byte {
	for i, c := range b {
		if c >= 0x7f {
			return appendJSON(append(make([]byte, 0, len(b)+64), b[:i]...), b[i:])
		}
	}
	return b
}

func appendJSON(out, b []byte) []byte {
	for len(b) > 0 {
		r, n := utf8.DecodeRune(b)
		switch {
		case r < ' ' && n == 1, strconv.IsPrint(r) && (r != utf8.RuneError || n > 1):
			out = append(out, b[:n]...) // the only control characters outside strings end a line
		case r > 0xffff:
			r -= 0x10000
			out = appendUnit(appendUnit(out, 0xd800+r>>10), 0xdc00+r&0x3ff)
		default:
			out = appendUnit(out, r)
		}
		b = b[n:]
	}
	return out
}

// appendUnit appends a UTF-16 code unit as a JSON escape.
func appendUnit(b []byte, u rune) []byte {
	const digits = "0123456789abcdef"
	return append(b, '\\', 'u', digits[u>>12&15], digits[u>>8&15], digits[u>>4&15], digits[u&15])
}

// JSONWriter applies JSON to each Write.
type JSONWriter struct{ W io.Writer }

// Write implements io.Writer.
func (w JSONWriter) Write(p []byte) (int, error) {
	out := JSON(p)
	n, err := w.W.Write(out)
	if err == nil || n > len(p) {
		n = len(p)
	}
	return n, err
}
