package explain

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/sluice-proxy/sluice/policy"
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

// Batch answers questions: lines of JSON in, lines of JSON out in the same
// order. Empty lines are passed over. A line that is no question is answered
// with {"error":"line 3: …"}, and the others go on. Answers are written when
// there is nothing more to read for the moment, so that a program can ask one
// by one. The error is that of reading or writing.
func Batch(t *policy.Table, in io.Reader, out io.Writer) (Summary, error) {
	var s Summary
	r := bufio.NewReaderSize(in, 64<<10)
	w := bufio.NewWriterSize(out, 64<<10)
	enc := newEncoder(w)
	for n := 1; ; n++ {
		line, readErr := readLine(r)
		if len(line) > 0 {
			var a any
			if q, err := parseLine(line); err != nil {
				err = fmt.Errorf("line %d: %w", n, err)
				if s.Failed++; s.First == nil {
					s.First = err
				}
				a = failure{err.Error()}
			} else {
				s.Answered++
				a = Ask(t, q)
			}
			if err := enc.Encode(a); err != nil {
				return s, err
			}
		}
		if readErr != nil || !moreLines(r) {
			if err := w.Flush(); err != nil {
				return s, err
			}
		}
		if errors.Is(readErr, io.EOF) {
			return s, nil
		}
		if readErr != nil {
			return s, readErr
		}
	}
}

// moreLines tells whether a whole line can be read without waiting.
func moreLines(r *bufio.Reader) bool {
	there, err := r.Peek(r.Buffered())
	return err == nil && bytes.IndexByte(there, '\n') >= 0
}

// readLine gives the next line without blanks around it, whole even if it is
// longer than the buffer. With io.EOF it may hold a last line.
func readLine(r *bufio.Reader) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if errors.Is(err, bufio.ErrBufferFull) {
		long := bytes.Clone(line)
		for errors.Is(err, bufio.ErrBufferFull) && len(long) <= maxLine {
			line, err = r.ReadSlice('\n')
			long = append(long, line...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			return nil, fmt.Errorf("a line is longer than %d bytes", maxLine)
		}
		line = long
	}
	return bytes.TrimSpace(line), err
}

// maxLine bounds the memory that a line takes.
const maxLine = 1 << 20
