package load

import (
	"bytes"
	"testing"
	"testing/iotest"
	"time"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

func TestPattern(t *testing.T) {
	const size = 3*patternChunk + 40
	var b bytes.Buffer
	must.OK(t, writePattern(&b, size))
	whole := b.Bytes()
	for _, c := range []struct {
		name  string
		spoil func([]byte) []byte
		want  uint64
		ok    bool
	}{
		{"whole", func(b []byte) []byte { return b }, size, true},
		{"short", func(b []byte) []byte { return b[:size-3] }, size - 3, true},
		{"one bit", func(b []byte) []byte { b[70001] ^= 4; return b }, 70001, false},
		{"a word lost", func(b []byte) []byte { return append(b[:8000:8000], b[8008:]...) }, 8000, false},
	} {
		data := c.spoil(bytes.Clone(whole))
		for name, r := range map[string]*bytes.Reader{"whole reads": bytes.NewReader(data), "odd reads": bytes.NewReader(data)} {
			in := iotest.DataErrReader(r)
			if name == "odd reads" {
				in = iotest.HalfReader(r)
			}
			got, err := readPattern(in, 1, 0)
			if got != c.want || (err == nil) != c.ok {
				t.Errorf("%s, %s: %d bytes right, %v; want %d", c.name, name, got, err, c.want)
			}
		}
	}
}

func TestPatternSlowSide(t *testing.T) {
	var b bytes.Buffer
	must.OK(t, writePattern(&b, 4*patternChunk))
	begin := time.Now()
	must.OK(t, must.Err(readPattern(&b, 1, 50*time.Millisecond)))
	if passed := time.Since(begin); passed < 50*time.Millisecond || passed > wait.Patience {
		t.Errorf("read for %v, at a byte a second for 50 ms and then at once", passed)
	}
}
