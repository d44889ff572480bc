package show

import (
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

func TestTcpdump(t *testing.T) {
	var out strings.Builder
	e := NewTcpdump(&out)
	for _, c := range []api.Connection{
		{Protocol: "TCP", Client: "10.1.0.2:4711", VIP: "10.96.0.10:80", SourceAddr: "10.1.0.2:20001", Endpoint: "10.2.0.2:8080"},
		{Protocol: "UDP", Client: "[fd00::2]:4711", VIP: "[fd00::a]:53"},
	} {
		must.OK(t, e.Row(&c))
	}
	must.OK(t, e.Flush())
	const want = `(tcp and host 10.1.0.2 and port 4711 and host 10.96.0.10 and port 80) or
(tcp and host 10.1.0.2 and port 20001 and host 10.2.0.2 and port 8080) or
(udp and host fd00::2 and port 4711 and host fd00::a and port 53)
`
	check.Textf(t, out.String(), want, "it says")
	if out.Reset(); NewTcpdump(&out).Flush() != nil || out.Len() > 0 {
		t.Error("no connections say something")
	}
}
