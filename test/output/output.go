// Package output collects what programs and logs write, for tests that read it meanwhile.
package output

import (
	"strings"
	"sync"
)

// Text is what was written until now. Its zero value is empty, and any goroutine may use it.
type Text struct {
	mu   sync.Mutex
	text strings.Builder // guarded by mu
}

func (t *Text) Write(b []byte) (int, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.Write(b)
}

func (t *Text) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.text.String()
}

// Contains reports whether a text was written.
func (t *Text) Contains(s string) bool { return strings.Contains(t.String(), s) }
