package e2e

import (
	"encoding/binary"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// packet is a TCP segment of a capture.
type packet struct {
	from, to netip.AddrPort
	flags    byte
}

const synFlag, rstFlag = 2, 4

// readCapture reads the TCP segments of a file of sluice pcap.
func readCapture(t *testing.T, path string) (list []packet) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil || len(b) < 24 || binary.LittleEndian.Uint32(b) != 0xa1b23c4d || binary.LittleEndian.Uint32(b[20:]) != 276 {
		t.Fatalf("%v: % x", err, b[:min(len(b), 24)])
	}
	if i, err := os.Stat(path); err != nil || i.Mode().Perm() != 0o600 {
		t.Errorf("%v, %v", i.Mode(), err)
	}
	last := uint64(0)
	for b = b[24:]; len(b) > 0; {
		at := uint64(binary.LittleEndian.Uint32(b))*1e9 + uint64(binary.LittleEndian.Uint32(b[4:]))
		if at < last {
			t.Error("packets are out of order")
		}
		last = at
		n := binary.LittleEndian.Uint32(b[8:])
		ip := b[16+20 : 16+n]
		b = b[16+n:]
		if ip[0]>>4 != 4 || ip[9] != syscall.IPPROTO_TCP {
			continue
		}
		tcp := ip[ip[0]&15*4:]
		port := func(addr []byte, port []byte) netip.AddrPort {
			return netip.AddrPortFrom(netip.AddrFrom4([4]byte(addr)), binary.BigEndian.Uint16(port))
		}
		list = append(list, packet{port(ip[12:], tcp), port(ip[16:], tcp[2:]), tcp[13]})
	}
	return list
}

// TestPacketsOfConnections: sluice pcap writes the packets of the connections that match, between
// client and proxy and between proxy and endpoint, also where only their end says that they match,
// and those of the endpoint that was tried in vain. Others' packets are not in the file.
func TestPacketsOfConnections(t *testing.T) {
	t.Parallel()
	onPaths(t, func(t *testing.T, path string) {
		lab := netns.NewLab(t, 3)
		serving, closed := lab.Backends[:2], on(8080, lab.Backends[2])[0]
		for _, b := range serving {
			b.EchoTCP(t, 8080)
		}
		web, other := webOn(lab), webService{name: "other", vips: []string{"10.96.0.11"}, port: 80, endpoints: on(8080, lab.Backends[1])}
		half := webService{name: "half", vips: []string{"10.96.0.12"}, port: 80, endpoints: on(8080, lab.Backends[0], lab.Backends[2])}
		web.endpoints = on(8080, serving...)
		p := prepareProxy(t, lab, []webService{web, other, half})
		p.start("--datapath", path, "--dial-timeouts", "1s,5s")
		folder := t.TempDir()
		captures := make(map[string]*netns.Cmd)
		for name, filter := range map[string]string{"web": "service=default/web", "reset": "end=client_reset", "half": "service=default/half"} {
			cmd := lab.Node.Command(t, built(t), "pcap", filter, "-w", filepath.Join(folder, name), "--wait", "1m", "--size", "10Mi")
			said := &output.Text{}
			cmd.Stderr = said
			must.OK(t, lab.Node.Do(cmd.Start))
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
			wait.True(t, "the capture begins", func() bool { return said.Contains("capturing") })
			captures[name] = cmd
		}
		visit := func(address string, reset bool) (from netip.AddrPort) {
			c, err := lab.Client.Dial("tcp", address)
			if err == nil {
				_, err = netns.AskOn(c)
			}
			must.OK(t, err)
			if reset {
				_ = c.(*net.TCPConn).SetLinger(0)
			}
			from = netip.MustParseAddrPort(c.LocalAddr().String())
			_ = c.Close()
			return from
		}
		clients := map[string][]netip.AddrPort{
			"web":   {visit("10.96.0.10:80", false), visit("10.96.0.10:80", true)},
			"other": {visit("10.96.0.11:80", true), visit("10.96.0.11:80", false)},
			"half":  {visit("10.96.0.12:80", false), visit("10.96.0.12:80", false), visit("10.96.0.12:80", false)},
		}
		records := make(map[netip.AddrPort]record)
		for _, r := range p.awaitRecords(7) {
			records[r.Client] = r
		}
		for name, want := range map[string][]netip.AddrPort{
			"web": clients["web"], "reset": {clients["web"][1], clients["other"][0]}, "half": clients["half"],
		} {
			_ = captures[name].Process.Signal(syscall.SIGINT)
			check.OKf(t, captures[name].Wait(), "%s", name)
			legs := make(map[[2]netip.AddrPort]byte)
			tried := false
			for _, k := range readCapture(t, filepath.Join(folder, name)) {
				legs[[2]netip.AddrPort{k.from, k.to}] |= k.flags
				tried = tried || k.to == closed
			}
			known := make(map[[2]netip.AddrPort]bool)
			for _, client := range want {
				r := records[client]
				there, onward := [2]netip.AddrPort{client, r.VIP}, [2]netip.AddrPort{r.SourceAddress, r.Endpoint}
				answer := [2]netip.AddrPort{r.Endpoint, r.SourceAddress}
				for _, leg := range [][2]netip.AddrPort{there, onward, answer, {r.VIP, client}} {
					known[leg] = true
				}
				// What a shortcut takes is seen where it comes in alone.
				if legs[there]&synFlag == 0 || legs[answer]&synFlag == 0 || name == "reset" && legs[there]&rstFlag == 0 {
					t.Errorf("%s: of %v there are flags %x, of %v %x", name, there, legs[there], answer, legs[answer])
				}
				if path == "relay" && legs[onward]&synFlag == 0 {
					t.Errorf("%s: of %v there are flags %x", name, onward, legs[onward])
				}
			}
			for leg := range legs {
				if !known[leg] && leg[0] != closed && leg[1] != closed {
					t.Errorf("%s has packets of %v", name, leg)
				}
			}
			if name == "half" && !tried {
				t.Error("no packet to the endpoint that was tried in vain")
			}
		}
	})
}
