package sys

import (
	"fmt"
	"runtime"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// The first capability that is missing is named. CAP_SYS_ADMIN stands for those split off it.
func TestMissing(t *testing.T) {
	const none Capability = 63
	lacks, is := Missing(none)
	check.Equal(t, is, true)
	check.Equal(t, lacks.String(), "capability 63")
	if _, is := Missing(NetRaw, unix.CAP_SYS_ADMIN); is {
		t.Skip("SKIP-NEEDS: root")
	}
	runtime.LockOSThread() // capabilities are a thread's
	defer runtime.UnlockOSThread()
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var all [2]unix.CapUserData
	must.OK(t, unix.Capget(&header, &all[0]))
	defer func() { must.OK(t, unix.Capset(&header, &all[0])) }()
	for _, tt := range []struct {
		has    uint32
		needed []Capability
		want   string
	}{
		{1<<NetRaw | 1<<unix.CAP_SYS_ADMIN, []Capability{NetRaw, BPF, Perfmon}, "capability 0 false"},
		{1<<NetRaw | 1<<unix.CAP_SYS_ADMIN, []Capability{NetRaw, NetAdmin, none}, "CAP_NET_ADMIN true"},
		{1 << NetRaw, []Capability{NetRaw, Perfmon, BPF}, "CAP_PERFMON true"},
		{1 << NetAdmin, []Capability{NetAdmin, BPF, NetRaw}, "CAP_BPF true"},
		{1 << NetAdmin, []Capability{NetAdmin, NetRaw}, "CAP_NET_RAW true"},
	} {
		some := [2]unix.CapUserData{{Effective: tt.has, Permitted: all[0].Permitted}, {Permitted: all[1].Permitted}}
		must.OK(t, unix.Capset(&header, &some[0]))
		lacks, is := Missing(tt.needed...)
		check.Equalf(t, fmt.Sprint(lacks, is), tt.want, "%v", tt.needed)
	}
}
