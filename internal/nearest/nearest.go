// Package nearest finds the name that a misspelled one was meant to be.
package nearest

import (
	"fmt"
	"iter"
	"strings"
)

// Name returns the first of the names that are the fewest edits away, if these are
// less than the limit; else "". Case does not count.
func Name(name string, limit int, names iter.Seq[string]) string {
	best := ""
	for n := range names {
		if d := distance(strings.ToLower(name), strings.ToLower(n)); d < limit {
			best, limit = n, d
		}
	}
	return best
}

// Hint returns `; did you mean "name"?` for the name that Name returns, or "".
func Hint(name string, limit int, names iter.Seq[string]) string {
	if best := Name(name, limit, names); best != "" {
		return fmt.Sprintf("; did you mean %q?", best)
	}
	return ""
}

// longest bounds the names that are compared, as the time grows with the product
// of their lengths.
const longest = 64

// distance counts the insertions, deletions and replacements of one character
// that turn a into b (Levenshtein).
func distance(a, b string) int {
	if len(a) > longest || len(b) > longest {
		return longest
	}
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal, row[j+1] = row[j+1], min(row[j]+1, row[j+1]+1, replaced)
		}
	}
	return row[len(b)]
}
