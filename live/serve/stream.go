package serve

import (
	"bufio"
	"context"
	"encoding/json"
	"net/http"
	"time"

	"github.com/sluice-proxy/sluice/internal/printable"
)

const (
	// readerPatience is how long a stream waits for a reader that has stopped before
	// it is cut.
	readerPatience = time.Minute
	// streamBuffer is the buffer of a stream.
	streamBuffer = 32 << 10
)

// stream is an answer of lines of JSON. Errors of writing stay in err; then nothing
// more is written.
type stream struct {
	w       http.ResponseWriter
	control *http.ResponseController
	buffer  *bufio.Writer
	request *http.Request
	begun   bool
	err     error
}

// stream serves lines of JSON, for a request with some of the allowed parameters.
func (h *Handler) stream(path string, f func(*stream, *params) error, allowed ...string) {
	h.mux.HandleFunc("GET "+path, func(w http.ResponseWriter, r *http.Request) {
		s := &stream{w: w, control: http.NewResponseController(w), request: r}
		s.buffer = bufio.NewWriterSize(timed{s}, streamBuffer)
		q := readParams(r, allowed)
		q.pods = &h.pods
		err := q.err
		// The answer to HEAD has no lines. Its end would not come, and the connection's
		// next request would wait for it.
		if err == nil && r.Method != http.MethodHead {
			err = f(s, q)
		}
		switch {
		case err == nil:
			s.begin()
		case !s.begun:
			fail(w, err)
			return
		case s.err == nil:
			s.send(map[string]string{"error": err.Error()})
		}
		s.flush()
	})
}

// timed writes to the client, with a deadline for each write.
type timed struct{ s *stream }

// Write implements io.Writer.
func (t timed) Write(b []byte) (int, error) {
	// Not all writers of tests have deadlines.
	_ = t.s.control.SetWriteDeadline(time.Now().Add(readerPatience))
	return t.s.w.Write(b)
}

func (s *stream) context() context.Context { return s.request.Context() }

// begin sends the head of the answer.
func (s *stream) begin() {
	if s.begun {
		return
	}
	s.begun = true
	_ = s.control.SetReadDeadline(time.Time{}) // the request has been read; a stream has no end
	s.w.Header().Set("Content-Type", "application/x-ndjson")
	s.w.Header().Set("X-Content-Type-Options", "nosniff")
	s.w.Header().Set("Cache-Control", "no-store")
	s.w.WriteHeader(http.StatusOK)
	s.flush()
}

// Write implements io.Writer: whole lines.
func (s *stream) Write(b []byte) (int, error) {
	s.begin()
	if s.err == nil {
		_, s.err = s.buffer.Write(b)
	}
	return len(b), s.err
}

// send writes one line.
func (s *stream) send(v any) {
	line, err := json.Marshal(v)
	if err != nil {
		s.err = err
		return
	}
	_, _ = s.Write(append(printable.JSON(line), '\n')) // the error stays in s.err
}

// flush sends what is buffered.
func (s *stream) flush() {
	if s.err == nil {
		s.err = s.buffer.Flush()
	}
	if s.err == nil {
		s.err = s.control.Flush()
	}
}
