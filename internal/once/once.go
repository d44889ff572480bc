// Package once keeps what was said from being said again, in bounded memory.
package once

// Most is how many texts are remembered.
const Most = 4096

// Texts remembers texts. The zero value is ready. It is not safe for concurrent
// use.
type Texts struct{ said map[string]struct{} }

// First reports whether a text is new, and remembers it. When there are too many, all
// are forgotten: rather some of them twice than memory that grows for ever, as
// texts hold what others write.
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
