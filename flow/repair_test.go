package flow

import (
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Programs of others may stand before and behind ours, and an interface that loses ours gets
// them again.
func TestProgramsOfOthersAndDetachedOnes(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	n := newNode(t, lab, nil)
	n.apply(svc(vip4, nil, at(lab.Backends[0].IPv4, 8080)))
	served := func(what string) {
		t.Helper()
		if said, err := lab.Client.Ask("tcp", vip4+":80"); err != nil || !strings.HasPrefix(said, "b1:8080") {
			t.Errorf("%s: %q, %v", what, said, err)
		}
	}
	served("alone")

	const next = -1 // TCX_NEXT
	for _, place := range []struct {
		name   string
		anchor link.Anchor
	}{{"before", link.Head()}, {"behind", link.Tail()}} {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SchedCLS, License: "Apache-2.0", Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, next), asm.Return()}})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = p.Close() })
		for index := range n.server.interfaces.links {
			for _, side := range []ebpf.AttachType{ebpf.AttachTCXIngress, ebpf.AttachTCXEgress} {
				err := sys.InNetNS(lab.Node.FD(), func() error {
					l, err := link.AttachTCX(link.TCXOptions{Interface: index, Program: p, Attach: side, Anchor: place.anchor})
					if err == nil {
						t.Cleanup(func() { _ = l.Close() })
					}
					return err
				})
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		served("another program " + place.name)
	}

	n.server.interfaces.mu.Lock() // nobody attaches them again meanwhile
	for _, h := range n.server.interfaces.links {
		if err := h.ingress.(*tcxHook).link.Detach(); err != nil {
			t.Error(err)
		}
	}
	_, err := lab.Client.Ask("tcp", vip4+":80")
	n.server.interfaces.mu.Unlock()
	if err == nil {
		t.Error("served without our programs")
	}
	wait.For(t, "the programs are there again", patience, func() error {
		_, err := lab.Client.Ask("tcp", vip4+":80")
		return err
	})
}
