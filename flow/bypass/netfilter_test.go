package bypass

import (
	"errors"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/features"
	"github.com/cilium/ebpf/link"

	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

func requireNetfilterPrograms(t *testing.T) {
	t.Helper()
	requireRoot(t)
	if err := features.HaveProgramType(ebpf.Netfilter); errors.Is(err, ebpf.ErrNotSupported) {
		t.Skipf("SKIP-NEEDS: BPF programs of netfilter (Linux 6.4): %v", err)
	}
}

// TestNetfilterPrograms: a BPF program that forwarded packets of this network namespace pass is
// found, and forgotten when it is gone.
func TestNetfilterPrograms(t *testing.T) {
	requireNetfilterPrograms(t)
	lab := netns.NewLab(t, 1)
	o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs))(t)
	t.Cleanup(o.close)
	found := func(when, want string) {
		t.Helper()
		if what, err := o.inStack(); what != want || err != nil {
			t.Errorf("%s: %q, %v; want %q", when, what, err, want)
		}
	}
	const program = "a BPF program of netfilter"
	for _, c := range []struct {
		name   string
		host   *netns.Host
		family link.NetfilterProtocolFamily
		hook   link.NetfilterInetHook
		want   string
	}{
		{"forward", lab.Node, link.NetfilterProtoIPv4, link.NetfilterInetForward, program},
		{"prerouting", lab.Node, link.NetfilterProtoIPv4, link.NetfilterInetPreRouting, program},
		{"postrouting of IPv6", lab.Node, link.NetfilterProtoIPv6, link.NetfilterInetPostRouting, program},
		{"input", lab.Node, link.NetfilterProtoIPv4, link.NetfilterInetLocalIn, ""},
		{"output of IPv6", lab.Node, link.NetfilterProtoIPv6, link.NetfilterInetLocalOut, ""},
		{"forward in a pod", lab.Backends[0], link.NetfilterProtoIPv4, link.NetfilterInetForward, ""},
	} {
		l := foreign.AttachNetfilter(t, c.host, c.family, c.hook)
		found(c.name, c.want)
		must.OK(t, l.Close())
		found(c.name+", when it was gone", "")
	}
	l := foreign.AttachNetfilter(t, lab.Node, link.NetfilterProtoIPv4, link.NetfilterInetForward)
	found("before it is detached", program)
	must.OK(t, l.Detach())
	found("detached", "")
}

// TestNetfilterProgramsUnread: where they cannot be found, no packet goes past them.
func TestNetfilterProgramsUnread(t *testing.T) {
	requireRoot(t)
	lab := netns.NewLab(t, 0)
	o := must.Get(openOthers(lab.Node.FD(), "sluice", isOurs))(t)
	t.Cleanup(o.close)
	o.unread = syscall.EPERM
	if what, err := o.inStack(); what != "" || !errors.Is(err, syscall.EPERM) {
		t.Errorf("%q, %v", what, err)
	}
}
