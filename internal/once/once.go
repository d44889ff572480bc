// Package once suppresses repeated log lines, in bounded memory.
package once

// Most bounds the remembered texts.
const Most = 4096

// Texts remembers texts. The zero value is ready for use. It is not safe for
// concurrent use.
type Texts struct{ said map[string]struct{} }

// First reports whether a text is new, and remembers it. When the set is full, it
// is cleared: repeated lines are better than unbounded memory, because texts
// contain strings from tenants.
func (t *Texts) First(text string) bool {
	if _, was := t.said[text]; was {
		return false
	}
	if t.said == nil || len(t.said) == Most {
		t.said = make(map[string]struct{})
	}
	t.said[text] = struct{}{}
	return true
}
