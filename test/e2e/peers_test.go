package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"regexp"
	"strconv"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// quickKeepAlive gives up a peer that sent nothing for two seconds.
const quickKeepAlive = "--keepalive=1s"

// eachEnd calls f for connections over IPv4 and IPv6, and for each of their ends.
func (j *joiner) eachEnd(t *testing.T, f func(name string, near, far *net.TCPConn)) {
	t.Helper()
	for _, address := range addresses(80, vip4, vip6) {
		c := j.join(t, j.lab.Client, address)
		f("client of "+address, c.client, c.server)
		c = j.join(t, j.lab.Client, address)
		f("endpoint of "+address, c.server, c.client)
	}
}

// TestPromise3_LivePeerMayPause stops reading, at the client and at the endpoint,
// for several times the time after which a lost peer is given up. Every byte must
// still arrive, whether the buffers on the path are full or not.
func TestPromise3_LivePeerMayPause(t *testing.T) {
	t.Parallel()
	bothWays(t, pauses)
}

func pauses(t *testing.T, splice string) {
	t.Parallel()
	const pause = 6 * time.Second
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, splice, quickKeepAlive)
	var running sync.WaitGroup
	for _, size := range []int{1 << 20, 16 << 20} {
		j.eachEnd(t, func(name string, reader, writer *net.TCPConn) {
			running.Go(func() {
				for sent := 0; sent < size; sent += 1 << 20 {
					if _, err := writer.Write(noise()[:1<<20]); err != nil {
						t.Errorf("write to the %s after %d bytes: %v", name, sent, err)
						return
					}
				}
				_ = writer.CloseWrite()
			})
			running.Go(func() {
				time.Sleep(pause) // the pause under test
				buf := make([]byte, 1<<20)
				for got := 0; got < size; got += len(buf) {
					if n, err := io.ReadFull(reader, buf); err != nil || !bytes.Equal(buf, noise()[:len(buf)]) {
						t.Errorf("%s: %v after %d bytes of %d, or wrong bytes", name, err, got+n, size)
						return
					}
				}
				wantEnd(t, reader)
				_ = reader.Close()
			})
		})
	}
	running.Wait()
	p.stop()
	for _, r := range p.records() {
		if r.End != "client_fin" && r.End != "endpoint_fin" {
			t.Errorf("%s to %s: %s, with %d bytes up and %d down", r.Client, r.VIP, r.End, r.BytesUp, r.BytesDown)
		}
	}
}

// TestGonePeerIsGivenUp disconnects a peer without a FIN: while nothing is in
// flight to it, while it has stopped reading, and while it is continuously sent
// small amounts. The record must name the side that did not answer, and the other
// side must be reset. At full size the test plays both kinds of disconnection on
// both sides.
func TestGonePeerIsGivenUp(t *testing.T) {
	t.Parallel()
	for _, side := range []string{"client", "endpoint"} {
		for _, how := range []string{"black-holed", "unplugged"} {
			if !full() && (side == "client") != (how == "black-holed") {
				continue
			}
			t.Run(side+"/"+how, func(t *testing.T) {
				t.Parallel()
				losePeers(t, side, how)
			})
		}
	}
}

func losePeers(t *testing.T, side, how string) {
	const within = 30 * time.Second // twice --keepalive is 2 s; a busy machine takes longer
	lab := netns.NewLab(t, 1)
	lab.Settle(t)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, quickKeepAlive)
	lost := lab.Client
	if side == "endpoint" {
		lost = lab.Backends[0]
	}
	var others []*net.TCPConn
	var running sync.WaitGroup
	wantReset := func(state string, err error) {
		if !isReset(err) {
			t.Errorf("the %s is gone, %s: the other side saw %v, want a reset", side, state, err)
		}
	}
	for _, state := range []string{"idle", "not reading", "sent to"} {
		for _, address := range addresses(80, vip4, vip6) {
			c := j.join(t, lab.Client, address)
			other := c.client
			if side == "client" {
				other = c.server
			}
			others = append(others, other)
			if state == "not reading" {
				_ = other.SetWriteDeadline(time.Now().Add(time.Second))
				_, _ = other.Write(make([]byte, 16<<20)) // fills all buffers
			}
			running.Go(func() {
				err := error(nil)
				if state == "sent to" {
					for tick := time.Tick(50 * time.Millisecond); err == nil; <-tick {
						_, err = other.Write([]byte("x"))
					}
				} else {
					_, err = io.Copy(io.Discard, other)
				}
				wantReset(state+" over "+address, err)
			})
		}
	}
	if how == "unplugged" {
		must.OK(t, lost.SetDown("eth0"))
	} else {
		const hole = "add table inet hole; add chain inet hole in { type filter hook input priority 0; policy drop; }"
		must.Run(t, lost.Command(t, administration(t, "nft"), hole))
	}
	gone := time.Now()
	for _, o := range others {
		_ = o.SetDeadline(gone.Add(within))
	}
	running.Wait()
	var records []record
	wait.For(t, "all records", within, func() (err error) {
		if records, err = readRecords(p.accessLog); err == nil && len(records) < len(others) {
			err = fmt.Errorf("%d of %d", len(records), len(others))
		}
		return err
	})
	t.Logf("given up within %v", time.Since(gone))
	for _, r := range records {
		check.Equalf(t, r.End, side+"_timeout", "%s to %s", r.Client, r.VIP)
	}
}

// TestKillResetsConnections kills the proxy during connections. Neither side may
// take a truncated stream for a complete one.
func TestKillResetsConnections(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	type reader struct {
		*net.TCPConn
		name string
	}
	var readers []reader
	var writing sync.WaitGroup
	defer writing.Wait()
	for _, state := range []string{"idle", "receiving", "half-closed"} {
		j.eachEnd(t, func(name string, near, far *net.TCPConn) {
			transfer(t, near, far, "up")
			transfer(t, far, near, "down")
			readers = append(readers, reader{near, state + " " + name})
			switch state {
			case "idle":
				readers = append(readers, reader{far, state + " opposite of the " + name})
			case "receiving":
				writing.Go(func() {
					for err := error(nil); err == nil; {
						_, err = far.Write(noise()[:1<<20])
					}
				})
				must.OK(t, must.Err(io.ReadFull(near, make([]byte, 4<<20))))
			case "half-closed":
				must.OK(t, near.CloseWrite())
				wantEnd(t, far)
			}
		})
	}
	p.kill()
	for _, r := range readers {
		if err := ended(r); !isReset(err) {
			t.Errorf("%s: it saw %v, want a reset", r.name, err)
		}
	}
}

// inFlight returns how many segments of a connection are not acknowledged.
func inFlight(t *testing.T, c *net.TCPConn) (segments uint32) {
	t.Helper()
	raw, err := c.SyscallConn()
	must.OK(t, err)
	var info *unix.TCPInfo
	must.OK(t, errors.Join(raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	}), err))
	return info.Unacked
}

// TestSlowReadersHoldLittleMemory plays clients and endpoints that never read, and others that read
// for a while and stop. The kernel's memory for each of them on the node must be bounded, however
// much is sent. It must accept what its window has promised: dropped bytes would reach a reader that
// reads again only after the writer's retransmission, seconds later.
func TestSlowReadersHoldLittleMemory(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	startProxy(t, lab, []webService{webOn(lab)})
	for _, c := range []struct{ read, most int }{
		{0, 3 << 19}, // with the kernel's own tuning it is 3 to 8 MiB
		{16 << 20, 5 << 20},
	} {
		var writers []*net.TCPConn
		for range 2 {
			j.eachEnd(t, func(_ string, reader, writer *net.TCPConn) {
				go func() {
					for err := error(nil); err == nil; {
						_, err = writer.Write(noise()[:1<<18])
					}
				}()
				writers = append(writers, writer)
				must.OK(t, must.Err(io.ReadFull(reader, make([]byte, c.read))))
			})
		}
		held, steady := 0, 0
		wait.For(t, "what is held does not grow any more", talkTimeout, func() error {
			now := socketMemory(t, lab.Node)
			if steady++; now != held {
				held, steady = now, 0
			}
			if steady < 10 {
				return errNotYet
			}
			return nil
		})
		each := held / len(writers)
		t.Logf("%d KiB for each of %d connections that read %d bytes", each>>10, len(writers), c.read)
		if each > c.most {
			t.Errorf("the kernel holds %d KiB for a connection whose reader read %d bytes and no more, want at most %d KiB", each>>10, c.read, c.most>>10)
		}
		if c.read == 0 {
			wait.For(t, "the node has taken all that was sent", talkTimeout, func() error {
				for _, w := range writers {
					if n := inFlight(t, w); n > 0 {
						return fmt.Errorf("%d segments from %s are on their way", n, w.LocalAddr())
					}
				}
				return nil
			})
		}
		for _, w := range writers {
			_ = w.SetLinger(0)
			_ = w.Close()
		}
		wait.Until(t, "the connections are gone", stopTimeout, func() bool { return socketMemory(t, lab.Node) == 0 })
	}
}

// socketMemory is the sum of bytes that a host's TCP connections have received and
// not read, and written and not delivered.
func socketMemory(t *testing.T, h *netns.Host) (sum int) {
	t.Helper()
	out, err := h.Command(t, administration(t, "ss"), "-tmnOH", "state", "connected").CombinedOutput()
	if err != nil {
		t.Fatalf("ss: %v\n%s", err, out)
	}
	for _, m := range regexp.MustCompile(`skmem:\(r(\d+),.*?,w(\d+),`).FindAllSubmatch(out, -1) {
		for _, text := range m[1:] {
			n := must.Get(strconv.Atoi(string(text)))(t)
			sum += n
		}
	}
	return sum
}
