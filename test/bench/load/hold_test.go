package load

import (
	"bytes"
	"encoding/json"
	"io"
	"net"
	"net/netip"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// The holder can talk to any echo server. Its port is the service's, so the test
// calls the holder's parts.
func TestHolder(t *testing.T) {
	l := must.Get(net.Listen("tcp", "127.0.0.1:0"))(t)
	var accepted []net.Conn
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			accepted = append(accepted, conn)
			go io.Copy(conn, conn)
		}
	}()

	h := holder{targets: map[string]string{"tcp": l.Addr().String()}, atOnce: 8}
	if r := h.open("tcp", 50); r.Good != 50 || len(h.conns) != 50 || r.P50 <= 0 || r.Max < r.P99 {
		t.Errorf("open 50: %+v", r)
	}
	if r := h.ping(); r.Good != 50 {
		t.Errorf("ping: %+v", r)
	}
	if r := h.close(20); r.Good != 20 || len(h.conns) != 30 {
		t.Errorf("close 20: %+v, %d open", r, len(h.conns))
	}
	l.Close()
	<-done
	if r := h.open("tcp", 3); r.Good != 0 || r.Errors["connection refused"] != 3 {
		t.Errorf("open against nobody: %+v", r)
	}
	for _, conn := range accepted {
		conn.Close()
	}
	if r := h.ping(); r.Good != 0 || len(h.conns) != 0 {
		t.Errorf("ping when the other side has gone: %+v", r)
	}
}

// A session is a socket that sent one request and got an answer.
func TestHoldSessions(t *testing.T) {
	echo := must.Get(net.ListenPacket("udp", "127.0.0.1:0"))(t)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for buf := make([]byte, 2*MessageSize); ; {
			n, from, err := echo.ReadFrom(buf)
			if err != nil {
				return
			}
			_, _ = echo.WriteTo(buf[:n], from)
		}
	}()
	h := holder{targets: map[string]string{"udp": echo.LocalAddr().String()}, atOnce: 4}
	if r := h.open("udp", 20); r.Good != 20 || len(h.conns) != 20 {
		t.Errorf("open 20: %+v", r)
	}
	if r := h.close(20); r.Good != 20 || len(h.conns) != 0 {
		t.Errorf("close 20: %+v, %d open", r, len(h.conns))
	}
	echo.Close()
	<-done
}

func TestHoldCommands(t *testing.T) {
	var out bytes.Buffer
	in := bytes.NewBufferString(`{"Op":"ping"}{"Op":"close","N":5}`)
	must.OK(t, Hold(netip.IPv6Loopback(), in, &out))
	replies := json.NewDecoder(&out)
	for i := range 2 {
		var r HoldReply
		if err := replies.Decode(&r); err != nil || r.Good != 0 || r.Open != 0 {
			t.Errorf("reply %d: %+v, %v", i, r, err)
		}
	}
	if err := Hold(netip.IPv6Loopback(), bytes.NewBufferString(`{"Op":"jump"}`), &out); err == nil {
		t.Error("an unknown command is no error")
	}
}
