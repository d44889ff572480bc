package sctp

import (
	"encoding/binary"
	"fmt"
	"hash/crc32"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// rss is the resident memory of the proxy in KiB.
func (p *proxy) rss() (kib int) {
	p.t.Helper()
	text := must.Read(p.t, fmt.Sprintf("/proc/%d/status", p.cmd.Process.Pid))
	for line := range strings.Lines(string(text)) {
		if n, _ := fmt.Sscanf(line, "VmRSS: %d kB", &kib); n == 1 {
			return kib
		}
	}
	p.t.Fatalf("no VmRSS in %s", text)
	return 0
}

// A flood of INITs to one Service leaves no state, and its neighbour is served meanwhile.
func TestProxyBearsAFloodOfINITs(t *testing.T) {
	lab := netns.NewLab(t, 2)
	for _, b := range lab.Backends {
		serve(t, b.Namespace, at(b), options(), echo)
	}
	p := startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "flooded", ip: "10.96.0.10", endpoints: []string{lab.Backends[0].IPv4.String()}},
		svc{name: "neighbour", ip: "10.96.0.11", endpoints: []string{lab.Backends[1].IPv4.String()}}))
	neighbour := must.Get(dial(lab.Client.Namespace, "10.96.0.11:3868", options()))(t)
	defer neighbour.abort()
	talk(t, neighbour, "before")
	before := p.rss()
	const inits = 20_000
	var fd int
	must.OK(t, lab.Client.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.IPPROTO_SCTP)
		return err
	}))
	defer sys.Close(fd)
	to := &unix.SockaddrInet4{Addr: netip.MustParseAddr("10.96.0.10").As4()}
	var took []time.Duration
	for i := range inits {
		must.OK(t, unix.Sendto(fd, initPacket(uint16(1024+i), uint32(i+1)), 0, to))
		if i%500 == 0 {
			began := time.Now()
			talk(t, neighbour, "beside the flood")
			took = append(took, time.Since(began))
		}
	}
	slices.Sort(took)
	median := took[len(took)/2]
	t.Logf("%d INITs; the neighbour waited %v, at most %v; the proxy grew by %d KiB", inits, median, took[len(took)-1], p.rss()-before)
	if median > time.Second/2 { // what else the machine has to do delays some
		t.Errorf("the neighbour waited %v", median)
	}
	if grown := p.rss() - before; grown > 8<<10 {
		t.Errorf("the proxy grew by %d KiB", grown)
	}
	for _, to := range []string{"10.96.0.10:3868", "10.96.0.11:3868"} {
		a := must.Get(dial(lab.Client.Namespace, to, options()))(t)
		talk(t, a, "a new one after the flood")
		a.abort()
	}
	p.ended(2) // no record of the flood
}

// initPacket is an INIT as a client begins with, to the port of Services.
func initPacket(from uint16, tag uint32) []byte {
	p := make([]byte, 12, 32)
	binary.BigEndian.PutUint16(p, from)
	binary.BigEndian.PutUint16(p[2:], port)
	p = append(p, 1, 0, 0, 20) // INIT, its length
	p = binary.BigEndian.AppendUint32(p, tag)
	p = binary.BigEndian.AppendUint32(p, 65536)
	p = append(p, 0, 10, 0, 10) // streams
	p = binary.BigEndian.AppendUint32(p, 1)
	binary.LittleEndian.PutUint32(p[8:], crc32.Checksum(p, crc32.MakeTable(crc32.Castagnoli)))
	return p
}

// Receivers that do not read cost the proxy a message each at most; what was sent arrives
// once they do.
func TestProxyBoundsSlowReaders(t *testing.T) {
	const readers, size = 60, 60_000
	lab := netns.NewLab(t, 2)
	slow, quick := lab.Backends[0], lab.Backends[1]
	small := sys.SCTPOptions{OutStreams: 10, InStreams: 10}
	read := make(chan struct{})
	serve(t, slow.Namespace, at(slow), small, func(p *peer) {
		defer sys.CloseInOrder(p.fd)
		p.buffer = make([]byte, size)
		<-read
		for n := 0; ; n++ {
			m, err := p.receive()
			if err != nil {
				return
			}
			if int(m.PPID) != n || len(m.text) != size {
				t.Errorf("message %d of %d bytes came in the place of %d", m.PPID, len(m.text), n)
			}
		}
	})
	serve(t, quick.Namespace, at(quick), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "slow", ip: "10.96.0.10", endpoints: []string{slow.IPv4.String()}},
		svc{name: "quick", ip: "10.96.0.11", endpoints: []string{quick.IPv4.String()}}))
	neighbour, err := dial(lab.Client.Namespace, "10.96.0.11:3868", options())
	must.OK(t, err)
	defer neighbour.abort()
	talk(t, neighbour, "before")
	before := p.rss()
	writers, sent := make([]*peer, readers), make([]int, readers)
	text := make([]byte, size)
	for i := range writers {
		if writers[i], err = dial(lab.Client.Namespace, "10.96.0.10:3868", small); err != nil {
			t.Fatal(err)
		}
		writers[i].buffer = make([]byte, 100)
	}
	for full := 0; full < readers; {
		full = 0
		for i, w := range writers {
			for w.box.Send(w.fd, text, sys.MessageInfo{PPID: uint32(sent[i])}) == 0 {
				sent[i]++
			}
			if !w.poll(unix.POLLOUT, 10*time.Millisecond) {
				full++
			}
		}
		talk(t, neighbour, "beside")
	}
	grown := p.rss() - before
	t.Logf("%d writers stopped, the first after %d messages; the proxy grew by %d KiB", readers, sent[0], grown)
	if most := 2*readers*64 + 8<<10; grown > most {
		t.Errorf("the proxy grew by %d KiB, more than %d", grown, most)
	}
	close(read)
	for _, w := range writers {
		check.OK(t, w.shutDown())
	}
	for _, r := range p.ended(readers) {
		if r.End != "client_shutdown" || r.BytesUp != r.FromClient*size || r.FromClient == 0 {
			t.Errorf("%+v", r)
		}
	}
}

// A peer that no longer answers is found in the stated times, and the other side gets an
// ABORT: half a minute while something is not acknowledged, a minute on a quiet
// association. Busy machines take longer, and the kernel by itself many minutes.
func TestProxyFindsLostPeers(t *testing.T) {
	for _, c := range []struct {
		name        string
		client      bool // it is the client that is lost
		sends       bool
		least, most time.Duration
		want        string
	}{
		{"quiet endpoint", false, false, 35 * time.Second, 2 * time.Minute, "endpoint_comm_lost"},
		{"endpoint", false, true, 15 * time.Second, time.Minute, "endpoint_comm_lost"},
		{"client", true, true, 15 * time.Second, time.Minute, "client_comm_lost"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			b := lab.Backends[0]
			accepted := make(chan *peer, 1)
			serve(t, b.Namespace, at(b), options(), func(p *peer) { accepted <- p })
			p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}))
			a := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
			defer a.abort()
			other := <-accepted
			defer other.abort()
			for _, pair := range [][2]*peer{{a, other}, {other, a}} {
				must.OK(t, pair[0].send(note{text: []byte("x")}))
				must.OK(t, must.Err(pair[1].receive()))
			}
			stays, lost := a, lab.Backends[0]
			if c.client {
				stays, lost = other, lab.Client
			}
			must.OK(t, lost.SetDown("eth0"))
			began := time.Now()
			if c.sends {
				must.OK(t, stays.send(note{text: []byte("to nobody")}))
			}
			check.ErrorIsf(t, must.Err(stays.receiveIn(c.most+patience)), sys.ECONNRESET, "the other side saw")
			took := time.Since(began)
			t.Logf("lost after %v", took.Round(time.Second/10))
			if took < c.least || took > c.most {
				t.Errorf("lost after %v, want %v to %v", took, c.least, c.most)
			}
			if r := p.ended(1)[0]; r.End != c.want {
				t.Errorf("%+v", r)
			}
		})
	}
}
