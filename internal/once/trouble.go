package once

// Trouble remembers what is wrong at the moment, so that it is logged when it
// begins, when it changes and when it is over. The zero value is ready. It is not
// safe for concurrent use.
type Trouble struct{ text string }

// New reports whether the trouble was not there before, and remembers it.
func (t *Trouble) New(text string) bool {
	is := text != t.text
	t.text = text
	return is
}

// Lasts reports whether there is trouble.
func (t *Trouble) Lasts() bool { return t.text != "" }

// Over reports whether there was trouble, and forgets it.
func (t *Trouble) Over() bool { return t.New("") }
