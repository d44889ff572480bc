package relay

import (
	"io"
	"net"
	"testing"

	"github.com/sluice-proxy/sluice/internal/poll"
	"github.com/sluice-proxy/sluice/internal/sys"
)

type ends chan End

func (e ends) LinkEnded(_ *Link, end End) { e <- end }

func TestSmoke(t *testing.T) {
	loop, err := poll.New()
	if err != nil {
		t.Fatal(err)
	}
	w := New(Config{Splice: true}).NewWorker(loop)
	go loop.Run()
	defer loop.Stop()
	ln, _ := net.Listen("tcp", "127.0.0.1:0")
	dial := func() (net.Conn, int) {
		c, err := net.Dial("tcp", ln.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		s, _ := ln.Accept()
		f, _ := s.(*net.TCPConn).File()
		s.Close()
		fd := int(f.Fd())
		sysfd := dup(t, fd)
		f.Close()
		return c, sysfd
	}
	a, afd := dial()
	b, bfd := dial()
	got := make(ends, 1)
	loop.Post(func() { w.Start(new(Link), Socket{FD: afd}, Socket{FD: bfd}, got) })
	big := make([]byte, 50<<20)
	for i := range big {
		big[i] = byte(i * 7 >> 3)
	}
	go func() { a.Write(big); a.(*net.TCPConn).CloseWrite() }()
	data, err := io.ReadAll(b)
	if err != nil || len(data) != len(big) || string(data) != string(big) {
		t.Fatal(err, len(data))
	}
	b.Write([]byte("hello"))
	b.Close()
	data, err = io.ReadAll(a)
	if string(data) != "hello" {
		t.Fatal(err, string(data))
	}
	if e := <-got; e != ClientFin {
		t.Fatal(e)
	}
	t.Logf("%+v", w.Stats())
	_ = sys.EAGAIN
}
