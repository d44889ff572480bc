package filter

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// Error is what is wrong with a filter, and where.
type Error struct {
	Filter  string // the whole text
	At, End int    // the bytes of Filter that are wrong
	Message string
}

// Error returns one line: "filter, column 19: no field \"attemptss\"; did you mean attempts?".
func (e *Error) Error() string {
	return fmt.Sprintf("filter, column %d: %s", utf8.RuneCountInString(e.Filter[:e.At])+1, e.Message)
}

// Pointer returns three lines: the filter, marks below the place, and the message.
func (e *Error) Pointer() string {
	blank := strings.Map(func(r rune) rune {
		if r == '\t' {
			return r
		}
		return ' '
	}, e.Filter[:e.At])
	marks := max(utf8.RuneCountInString(e.Filter[e.At:e.End]), 1)
	return e.Filter + "\n" + blank + strings.Repeat("^", marks) + "\n" + e.Message
}
