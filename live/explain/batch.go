package explain

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
)

// Summary is what a batch came to.
type Summary struct {
	Answered int
	Failed   int
	// First is what was wrong first, with its line; nil if nothing was.
	First error
}

// failure is the answer to a line that is no question.
type failure struct {
	Error string `json:"error"`
}

// Asker answers a question by a policy, or has a running proxy answer it.
type Asker func(Question) (*Answer, error)

// Batch answers questions: lines of JSON in, lines of JSON out in the same
// order. Empty lines are passed over. A line that is no question is answered
// with {"error":"line 3: …"}, and the others go on. Answers are written when
// there is nothing more to read for the moment, so that a program can ask one
// by one. The error is that of reading, asking or writing.
func Batch(ask Asker, in io.Reader, out io.Writer) (Summary, error) {
	var s Summary
	w := bufio.NewWriterSize(out, 64<<10)
	lines := bufio.NewScanner(flusher{in, w})
	lines.Buffer(make([]byte, 64<<10), maxLine)
	enc := newEncoder(w)
	for n := 1; lines.Scan(); n++ {
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		var a any
		if q, err := parseLine(line); err != nil {
			err = fmt.Errorf("line %d: %w", n, err)
			if s.Failed++; s.First == nil {
				s.First = err
			}
			a = failure{err.Error()}
		} else if a, err = ask(q); err != nil {
			return s, cmp.Or(w.Flush(), err)
		} else {
			s.Answered++
		}
		if err := enc.Encode(a); err != nil {
			return s, err
		}
	}
	err := lines.Err()
	if errors.Is(err, bufio.ErrTooLong) {
		err = fmt.Errorf("a line is longer than %d bytes", maxLine)
	}
	return s, cmp.Or(err, w.Flush())
}

// flusher writes the answers before it reads on, which may wait.
type flusher struct {
	io.Reader
	out *bufio.Writer
}

func (f flusher) Read(p []byte) (int, error) {
	if err := f.out.Flush(); err != nil {
		return 0, err
	}
	return f.Reader.Read(p)
}

// maxLine bounds the memory that a line takes.
const maxLine = 1 << 20
