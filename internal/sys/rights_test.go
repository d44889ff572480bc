package sys

import (
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
)

func TestSendFiles(t *testing.T) {
	path := filepath.Join(t.TempDir(), "socket")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	from, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: path})
	if err != nil {
		t.Fatal(err)
	}
	defer from.Close()
	to, err := l.AcceptUnix()
	if err != nil {
		t.Fatal(err)
	}
	defer to.Close()

	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if err := SendFiles(from, []byte("hello"), w, r); err != nil {
		t.Fatal(err)
	}
	w.Close()
	p := make([]byte, 16)
	n, files, err := ReceiveFiles(to, p, 2)
	if err != nil || string(p[:n]) != "hello" || len(files) != 2 {
		t.Fatalf("got %q, %d files, %v; want \"hello\" and 2 files", p[:n], len(files), err)
	}
	if _, err := files[0].WriteString("through"); err != nil {
		t.Fatal(err)
	}
	files[0].Close()
	if got, err := io.ReadAll(files[1]); err != nil || string(got) != "through" {
		t.Errorf("read %q, %v from the pipe that came over", got, err)
	}
	files[1].Close()

	// More files than the receiver takes are an error, and none stays open.
	if err := SendFiles(from, []byte("x"), r, r, r); err != nil {
		t.Fatal(err)
	}
	if _, files, err := ReceiveFiles(to, p, 1); err == nil {
		t.Errorf("3 files where 1 is taken: no error, %d files", len(files))
	}
}
