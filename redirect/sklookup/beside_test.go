package sklookup

import (
	"errors"
	"io"
	"net/netip"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/redirect"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// quiet is another mode that never asks for Verify.
type quiet struct{ Beside }

func (quiet) Changed() <-chan struct{} { return nil }

// While an address moves between the parts of a plan, others ask both modes. The race detector
// judges.
func TestOthersAskWhilePlansChange(t *testing.T) {
	b := &beside{Beside: quiet{}}
	r := &Redirector{beside: b}
	asked := make(chan struct{})
	go func() { defer close(asked); r.Changed() }()
	b.split(&redirect.Plan{Local: redirect.LocalOf(netip.MustParsePrefix("10.96.0.0/16"))})
	b.split(&redirect.Plan{NonLocal: redirect.SetOf(netip.MustParseAddr("10.96.0.1"))})
	<-asked
}

// Rule A3.13: what a client on another host had open to an address that is not
// ours goes on past us when a Service takes its port. (Netfilter looks for a
// packet's socket and asks the program, which must not know the port.)
func TestConnectionsPastUsGoOn(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 80)
	r := newBeside(t, lab.Node)
	t.Cleanup(func() { _ = r.Close() })
	var p redirect.Plan
	var open []io.ReadWriter
	for _, pair := range []struct{ vip, via, lane netip.Addr }{
		{netip.MustParseAddr("192.0.2.10"), lab.Backends[0].IPv4, redirect.ListenIPv4},
		{netip.MustParseAddr("2001:db8::10"), lab.Backends[0].IPv6, redirect.ListenIPv6},
	} {
		at := netip.PrefixFrom(pair.vip, pair.vip.BitLen())
		must.OK(t, errors.Join(lab.Backends[0].AddAddr("lo", at), lab.Node.AddRoute(at, pair.via)))
		dst := service.Destination{Addr: pair.vip, Port: 80, Protocol: service.TCP}
		c := lab.Client.Connect(t, "tcp", netip.AddrPortFrom(dst.Addr, dst.Port).String())
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		must.Equalf(t, must.Get(netns.AskOn(c))(t), "b1:80", "past us")
		open = append(open, c)
		err := lab.Node.Do(func() error {
			fd, err := sys.ListenTCP(netip.AddrPortFrom(pair.lane, 0), sys.ListenOptions{Transparent: true})
			if err != nil {
				return err
			}
			t.Cleanup(func() { sys.Close(fd) })
			own, errno := sys.LocalAddr(fd)
			if errno != 0 {
				return errno
			}
			p.Steer = p.Steer.With(dst, redirect.Target{Port: own.Port(), FD: fd})
			return nil
		})
		must.OK(t, err)
		p.NonLocal = p.NonLocal.With(pair.vip, struct{}{})
	}
	must.OK(t, r.Apply(p))
	for i, c := range open {
		got := make([]byte, 5)
		_, err := c.Write([]byte("still"))
		if err == nil {
			_, err = io.ReadFull(c, got)
		}
		if err != nil || string(got) != "still" {
			t.Errorf("connection %d: %q, %v", i, got, err)
		}
	}
	if repaired, err := r.Verify(); repaired || err != nil {
		t.Errorf("verify: %v, %v", repaired, err)
	}
}
