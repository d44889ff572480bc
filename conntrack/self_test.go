package conntrack

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/check"
)

// The node's own processes have the source address that the kernel chose, such as the
// gateway of its pods: their records name the node. Its name goes with the connection,
// also while that is parked.
func TestRecordsNameTheNodeAsClient(t *testing.T) {
	table := NewTable(Options{})
	defer closeTable(t, table)
	table.SetNode("node-a", []netip.Addr{netip.MustParseAddr("192.0.2.1"), netip.MustParseAddr("10.244.1.1"), netip.MustParseAddr("fd00:10:244:1::1")})
	s := table.Shard(0)
	for client, want := range map[string]string{
		"10.244.1.1:40000": "node-a", "[fd00:10:244:1::1]:40000": "node-a", "192.0.2.1:1": "node-a", "127.0.0.1:2": "node-a", "[::1]:2": "node-a",
		"10.244.1.2:40000": "", "192.0.2.2:1": "",
	} {
		r := Record{Client: netip.MustParseAddrPort(client)}
		s.Open(&r)
		check.Equalf(t, r.ClientNode(), want, "%s", client)
		var listed Record
		r.copyTo(&listed, Listed, 0)
		check.Equalf(t, listed.ClientNode(), want, "%s, listed", client)
		var parked Parked
		if !s.Park(&r, &parked, describer{r.Client}) {
			t.Fatal("not parked")
		}
		parked.with(s, func(r *Record) {
			check.Equalf(t, r.ClientNode(), want, "%s, parked", client)
		})
		s.Unpark(&parked, &r)
		s.Close(&r)
	}
	var text strings.Builder
	NewJSONEncoder(&text).Encode(&examples()[0])
	if !strings.Contains(text.String(), `"client":"10.0.0.7:41822","client_node":"node-a","vip"`) {
		t.Error(text.String())
	}
}

// describer is the Keeper of a parked connection of which only the client counts.
type describer struct{ client netip.AddrPort }

func (d describer) Describe(r *Record) { r.Client = d.client }
