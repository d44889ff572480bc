package e2e

import (
	"fmt"
	"io"
	"net"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// TestReadersThatStopShareMemory plays clients and endpoints that read 16 MiB and stop: at most
// --max-bulk-buffers of them hold large buffers on the node. A quiet or ended stream returns its
// buffers.
func TestReadersThatStopShareMemory(t *testing.T) {
	rounds, most := 4, 2
	if full() {
		rounds, most = 100, 64
	}
	lab := netns.NewLab(t, 1)
	j := newJoiner(t, lab, lab.Backends[0], 8080)
	p := startProxy(t, lab, []webService{webOn(lab)}, "--max-bulk-buffers", fmt.Sprint(most), "--keepalive", "2s")
	inUse := func(what string, check func(places, refused float64) bool) {
		t.Helper()
		wait.For(t, what, startTimeout, func() error {
			m, err := p.metrics()
			if err != nil {
				return err
			}
			if places, refused := m["sluice_relay_bulk_buffers"], m["sluice_relay_bulk_buffers_refused_total"]; !check(places, refused) {
				return fmt.Errorf("%v of %d in use, refused %v times", places, most, refused)
			}
			return nil
		})
	}
	free := func(places, _ float64) bool { return places == 0 }

	// A stream that was fast, and has nothing to say.
	quiet := j.join(t, lab.Client, addresses(80, vip4)[0])
	go func() {
		for range 16 {
			_, _ = quiet.server.Write(noise()[:1<<20])
		}
	}()
	must.OK(t, must.Err(io.ReadFull(quiet.client, make([]byte, 16<<20))))
	inUse("the place of a quiet stream is free", free)

	var writers []*net.TCPConn
	for range rounds {
		j.eachEnd(t, func(_ string, reader, writer *net.TCPConn) {
			_ = reader.SetReadBuffer(256 << 10) // their memory is not what is measured
			_ = writer.SetWriteBuffer(256 << 10)
			go func() {
				for err := error(nil); err == nil; {
					_, err = writer.Write(noise()[:1<<18])
				}
			}()
			writers = append(writers, writer)
			must.OK(t, must.Err(io.ReadFull(reader, make([]byte, 16<<20))))
		})
	}
	held, steady := 0, 0
	wait.For(t, "what is held does not grow any more", talkTimeout, func() error {
		now := socketMemory(t, lab.Node)
		if steady++; now > held+held/64 {
			steady = 0
		}
		held = max(held, now)
		if steady < 10 {
			return errNotYet
		}
		return nil
	})
	bound := most*5<<20 + len(writers)*3<<19
	t.Logf("%d KiB for %d connections that read 16 MiB, %d KiB for each", held>>10, len(writers), held/len(writers)>>10)
	if held > bound {
		t.Errorf("the kernel holds %d KiB for %d connections whose readers have stopped, want at most %d KiB", held>>10, len(writers), bound>>10)
	}
	inUse("all places are taken", func(places, refused float64) bool { return places == float64(most) && refused > 0 })
	transfer(t, quiet.client, quiet.server, "others go on")
	for _, w := range writers {
		_ = w.SetLinger(0)
		_ = w.Close()
	}
	inUse("the places are free after the end", free)
}
