package attach

import (
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/test/foreign"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// patience bounds every wait of the tests.
const patience = 20 * time.Second

// opened keeps programs that do nothing at the interfaces of a lab's node. change may alter the
// options.
func opened(t *testing.T, node *netns.Host, change func(*Options)) *Interfaces {
	t.Helper()
	p := foreign.Idle(t)
	o := Options{Ethernet: Programs{Ingress: p, Egress: p}, Namespace: node.FD(), Logger: zerolog.New(zerolog.NewTestWriter(t))}
	if change != nil {
		change(&o)
	}
	i := must.Get(Open(o))(t)
	t.Cleanup(func() { i.Close(false) })
	must.OK(t, i.Start())
	return i
}
