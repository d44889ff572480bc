package sys

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

func TestSendFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l := must.Get(net.ListenUnix("unix", &net.UnixAddr{Name: path}))(t)
	defer l.Close()
	from := must.Get(net.DialUnix("unix", nil, &net.UnixAddr{Name: path}))(t)
	defer from.Close()
	to := must.Get(l.AcceptUnix())(t)
	defer to.Close()

	r, w, err := os.Pipe()
	must.OK(t, err)
	defer r.Close()
	must.OK(t, SendFiles(from, []byte("hello"), w, r))
	w.Close()
	p := make([]byte, 16)
	n, files, err := ReceiveFiles(to, p, 2)
	if err != nil || string(p[:n]) != "hello" || len(files) != 2 {
		t.Fatalf("got %q, %d files, %v; want \"hello\" and 2 files", p[:n], len(files), err)
	}
	must.OK(t, must.Err(files[0].WriteString("through")))
	files[0].Close()
	if got, err := io.ReadAll(files[1]); err != nil || string(got) != "through" {
		t.Errorf("read %q, %v from the pipe that came over", got, err)
	}
	files[1].Close()

	// More files than the receiver takes are an error, and none stays open.
	must.OK(t, SendFiles(from, []byte("x"), r, r, r))
	if _, files, err := ReceiveFiles(to, p, 1); err == nil {
		t.Errorf("3 files where 1 is taken: no error, %d files", len(files))
	}
}
