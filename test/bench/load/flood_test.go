package load

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/bench/world"
	"github.com/sluice-proxy/sluice/test/must"
)

// A flood's datagrams reach the server, each from another source, at no more than
// the rate. Nobody receives the answers.
func TestFlood(t *testing.T) {
	if os.Geteuid() != 0 {
		if os.Getenv("SLUICE_REQUIRE_ROOT") != "" {
			t.Fatal("root is needed")
		}
		t.Skip("SKIP-NEEDS: root")
	}
	w, err := world.New(world.Options{Clients: 1, Endpoints: 1})
	must.OK(t, err)
	defer w.Close()
	must.OK(t, w.Strangers(Strangers))
	var server *net.UDPConn
	err = w.Server.Do(func() (err error) {
		server, err = net.ListenUDP("udp4", net.UDPAddrFromAddrPort(netip.AddrPortFrom(w.Endpoints[0], PortUDPFlood)))
		return err
	})
	must.OK(t, err)
	defer server.Close()
	var f *flooder
	err = w.Client.Do(func() (err error) {
		f, err = newFlooder(Spec{Targets: w.Endpoints, Flood: 2000})
		return err
	})
	must.OK(t, err)
	for range 20 {
		if errno := f.send(); errno != 0 {
			t.Fatal(errno)
		}
	}
	seen := map[netip.AddrPort]bool{}
	must.OK(t, server.SetReadDeadline(time.Now().Add(20*time.Second)))
	for buf := make([]byte, 64); len(seen) < 20; {
		n, from, err := server.ReadFromUDPAddrPort(buf)
		if err != nil || n != 8 || !Strangers.Contains(from.Addr()) || seen[from] {
			t.Fatalf("after %d: %d bytes from %s, again: %v; %v", len(seen), n, from, seen[from], err)
		}
		seen[from] = true
		must.OK(t, must.Err(server.WriteToUDPAddrPort(buf[:n], from)))
	}
	begin := now()
	f.run(window{begin: begin, end: begin + 20e6})
	if most := 2000 * time.Duration(now()-begin).Seconds(); float64(f.m.sent) > most || len(f.m.errors) > 0 {
		t.Errorf("%d datagrams, at most %.0f are due; errors %v", f.m.sent, most, f.m.errors)
	}
}

func TestStrangersAreMany(t *testing.T) {
	f, seen := &flooder{}, map[uint64]bool{}
	for range 200000 {
		f.stranger()
		source := netip.AddrFrom4([4]byte(f.packet[12:16]))
		key := uint64(binary.BigEndian.Uint32(f.packet[12:]))<<16 | uint64(binary.BigEndian.Uint16(f.packet[20:]))
		if seen[key] || !Strangers.Contains(source) {
			t.Fatalf("%s comes twice, or is no stranger", source)
		}
		seen[key] = true
	}
}

func TestFloodIsIPv4(t *testing.T) {
	if _, err := newFlooder(Spec{Targets: []netip.Addr{netip.IPv6Loopback()}, Flood: 1}); err == nil {
		t.Error("IPv6 is no error")
	}
}
