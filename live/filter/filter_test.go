package filter

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/policy"
	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// sample is a connection whose second endpoint answered.
func sample() *conntrack.Record {
	dead := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:8080"), Pod: service.Name{Namespace: "shop", Name: "cart-1"}}
	r := &conntrack.Record{
		ID: 17, Protocol: service.TCP, Kind: service.ClusterIP, Client: netip.MustParseAddrPort("10.2.3.4:40000"), VIP: netip.MustParseAddrPort("10.96.0.10:80"),
		Port: &service.Port{Name: service.PortName{Name: service.Name{Namespace: "shop", Name: "cart"}, Port: "http"}},
		Endpoint: &service.Endpoint{
			Addr: netip.MustParseAddrPort("10.1.0.5:8080"), Place: service.At("node-b", "Z2"), Pod: service.Name{Namespace: "shop", Name: "cart-2"},
		},
		SourceAddr: netip.MustParseAddrPort("10.1.0.1:50000"), Source: policy.SourceNode,
		Failed:   []conntrack.Attempt{{Endpoint: dead, Error: conntrack.DialTimeout, Duration: int64(250 * time.Millisecond)}},
		Attempts: 2, Connected: true, ConnectTime: int64(251 * time.Millisecond), Duration: int64(3 * time.Second),
		BytesFromClient: 1000, BytesFromEndpoint: 2_000_000, End: conntrack.EndpointReset,
	}
	r.BeginWait(0)
	r.EndWait(int64(200 * time.Millisecond))
	return r
}

func TestMatch(t *testing.T) {
	// An open connection that has no endpoint yet.
	waits := sample()
	waits.Endpoint, waits.Connected, waits.Failed, waits.End, waits.SourceAddr, waits.Attempts = nil, false, nil, conntrack.EndNone, netip.AddrPort{}, 0
	for _, tt := range []struct {
		filter string
		sample bool
		waits  bool
	}{
		{"", true, true},
		{"service=cart", true, true},
		{"service=shop/cart", true, true},
		{"service=shop/cart:http", true, true},
		{"service=shop/cart:https", false, false},
		{"service=sho*/ca*", true, true},
		{"service=shop", false, false},
		{"service!=cart", false, false},
		{"namespace=shop", true, true},
		{"namespace=sh", false, false},
		{"client=10.2.3.4", true, true},
		{"client=10.2.0.0/16", true, true},
		{"client=10.3.0.0/16,10.2.0.0/16", true, true},
		{"client=10.2.3.4:40000", true, true},
		{"client=10.2.3.4:40001", false, false},
		{"vip=:80", true, true},
		{"vip=:70-79", false, false},
		{"vip=:79-81", true, true},
		{"endpoint=10.1.0.5", true, false},
		{"endpoint!=10.1.0.5", false, true},
		{"endpoint=10.1.0.4", false, false},
		{"tried=10.1.0.4", true, false},
		{"tried=10.1.0.5", true, false},
		{"source_address=10.1.0.1", true, false},
		{"pod=cart-2", true, false},
		{"pod=shop/cart-*", true, false},
		{"pod=cart-1", false, false},
		{"node=node-b zone=Z2", true, false},
		{"node=node-b zone=z1", false, false},
		{"zone!=z1", true, true},
		{"protocol=tcp", true, true},
		{"path=relay", true, true},
		{"state=ended", true, false},
		{"state=connecting", false, true},
		{"end=endpoint_reset,idle", true, false},
		{"end!=endpoint_reset", false, true},
		{"end=idle", false, false},
		{"error=timeout", true, false},
		{"error=refused", false, false},
		{"error!=refused", true, true},
		{"affinity=none", true, true},
		{"vip_kind=ClusterIP", true, true},
		{"source=node", true, false},
		{"id=17", true, true},
		{"attempts>1", true, false},
		{"attempts>=2", true, false},
		{"attempts>2", false, false},
		{"attempts<2", false, true},
		{"attempts=1..2", true, false},
		{"attempts!=1..2", false, true},
		{"failures=1", true, false},
		{"bytes>2MB", true, true},
		{"bytes>2MiB", false, false},
		{"bytes_from_client<=1kB", true, true},
		{"bytes_from_endpoint=2MB", true, true},
		{"duration>2s", true, true},
		{"connect>250ms connect<252ms", true, false},
		{"first_byte>=0", false, false},
		{"waited=200ms", true, true},
		{"waited>200ms", false, false},
		{"bytes>2000999", true, true},
		{"bytes>2001000", false, false},
		{"cart", true, true},
		{"CART", true, true},
		{"p/ca", true, true},
		{"shop/cart:http", true, true},
		{"p/cart:ht", true, true},
		{"rt:http", true, true},
		{":http", true, true},
		{"shop/ca:http", false, false},
		{"cart:https", false, false},
		{"shop/cart-2", true, false},
		{"op/cart-2", true, false},
		{"other/cart-2", false, false},
		{"client=::ffff:10.2.0.0/112", true, true},
		{"client=::ffff:10.2.3.4/128", true, true},
		{"client=::ffff:10.3.0.0/112", false, false},
		{"client=::/0", false, false},
		{"10.1.0.5", true, false},
		{"2.3.4:400", true, true},
		{"96.0.10:80", true, true},
		{"node-b cart-2", true, false},
		{"z2", true, false},
		{"Z2", true, false},
		{"elsewhere", false, false},
		{`"cart" service="shop/cart"`, true, true},
		{`service!="=<>!"`, true, true},
		{"service=*/cart:*", true, true},
	} {
		f, err := Parse(tt.filter)
		if err != nil {
			t.Errorf("%s: %v", tt.filter, err)
			continue
		}
		if got := f.Match(sample()); got != tt.sample {
			t.Errorf("%s: %t for a connection that ended, want %t", tt.filter, got, tt.sample)
		}
		if got := f.Match(waits); got != tt.waits {
			t.Errorf("%s: %t for one without an endpoint, want %t", tt.filter, got, tt.waits)
		}
	}
}

// Errors point at the place that is wrong.
func TestErrors(t *testing.T) {
	for _, tt := range []struct{ filter, want string }{
		{"service=shop attemptss>1", `
service=shop attemptss>1
             ^^^^^^^^^
there is no field "attemptss"; did you mean attempts?`},
		{"end=endpoint_rest", `
end=endpoint_rest
    ^^^^^^^^^^^^^
"endpoint_rest" is not one of client_fin, client_reset, client_timeout, endpoint_fin, endpoint_reset, endpoint_timeout, idle, shutdown, connect_failed, no_endpoints, limit, not_admitted, responses, endpoint_gone, evicted, namespace_limit, admin, client_shutdown, client_abort, client_comm_lost, endpoint_shutdown, endpoint_abort, endpoint_comm_lost, message_too_large, no_stream, not_forwarded, proxy_header, proxy_header_timeout, proxy_not_trusted, drained, rebalanced, no_local_endpoints, unknown_port, unknown_address; did you mean endpoint_reset?`},
		{"state=open,closed", `
state=open,closed
           ^^^^^^
"closed" is not one of connecting, open, ended`},
		{"client=10.1.0.0/33", `
client=10.1.0.0/33
       ^^^^^^^^^^^
this is not an address such as 10.0.0.7, 10.0.0.7:80, 10.1.0.0/16, [fd00::7]:80, :443 or :8000-8999`},
		{"vip=10.0.0.1:99999", `
vip=10.0.0.1:99999
    ^^^^^^^^^^^^^^
"99999" is not a port or a range of ports such as 8000-8999`},
		{"service>a", `
service>a
       ^
service has no order: use = or !=`},
		{"bytes>", `
bytes>
^^^^^^
bytes> needs a value, such as bytes=1MB..1GB`},
		{"bytes=1MB..1kB", `
bytes=1MB..1kB
      ^^^^^^^^
the range 1MB..1kB is empty: its first value is the larger one`},
		{"bytes>1MB..2MB", `
bytes>1MB..2MB
      ^^^^^^^^
> takes one value, not a range`},
		{"bytes=1XB", `
bytes=1XB
      ^^^
"1XB" is not a size such as 500, 64KiB, 1MB or 2.5GB`},
		{"duration>5", `
duration>5
         ^
"5" is not a duration such as 250ms, 5s or 1h30m`},
		{"attempts=many", `
attempts=many
         ^^^^
"many" is not a number such as 3`},
		{"bytes>10000000TB", `
bytes>10000000TB
      ^^^^^^^^^^
"10000000TB" is not a size such as 500, 64KiB, 1MB or 2.5GB`},
		{"id>9223372036854775807", `
id>9223372036854775807
   ^^^^^^^^^^^^^^^^^^^
no value is beyond this`},
		{"a\tservice=:http", `
a	service=:http
 	        ^^^^^
a service is namespace/name or namespace/name:port, such as shop/cart:http`},
		{"=5", `
=5
^
a field must stand before =, such as service=`},
		{"node=a,,b", `
node=a,,b
       ^
node needs a value here, such as node=node-b`},
		{`pod="a b`, `
pod="a b
    ^^^^
this quote has no end`},
		{`node=a ""`, `
node=a ""
       ^^
this word is empty; id>0 selects all`},
		{`pod=a"b"`, `
pod=a"b"
    ^^^^
quotes must be around the whole value, such as pod="a b"`},
		{"service!==shop/cart", `
service!==shop/cart
         ^
operators are =, !=, <, <=, > and >=, between a field and a value; a value with = is in quotes`},
		{"attempts=>2", `
attempts=>2
         ^
operators are =, !=, <, <=, > and >=, between a field and a value; a value with > is in quotes`},
		{"node=a,b=c", `
node=a,b=c
        ^
operators are =, !=, <, <=, > and >=, between a field and a value; a value with = is in quotes`},
		{"a !cart", `
a !cart
  ^
operators are =, !=, <, <=, > and >=, between a field and a value; a value with ! is in quotes`},
		{"pod=shop/*-7", `
pod=shop/*-7
    ^^^^^^^^
* may only be at the end of a name`},
		{"service=*p/cart", `
service=*p/cart
        ^^^^^^^
* may only be at the end of a name`},
		{"node!=a*b", `
node!=a*b
      ^^^
* may only be at the end of a name`},
		{"ü=1 x=1", `
ü=1 x=1
^
there is no field "ü"; fields are affinity, attempts, bytes, bytes_from_client, bytes_from_endpoint, client, client_node, client_pod, client_rtt, connect, duration, end, endpoint, endpoint_rtt, error, failures, first_byte, id, idle, namespace, node, path, pod, protocol, retransmits, rtt, service, source, source_address, state, tried, unacked, via, vip, vip_kind, waited, zone`},
	} {
		_, err := Parse(tt.filter)
		e, ok := err.(*Error)
		if !ok {
			t.Errorf("%s: error %v", tt.filter, err)
			continue
		}
		if got := "\n" + e.Pointer(); got != tt.want {
			t.Errorf("%s:%s\nwant:%s", tt.filter, got, tt.want)
		}
	}
	if _, err := Parse(strings.Repeat("a ", MaxLength)); err == nil {
		t.Error("no error about a filter that is too long")
	}
	for _, text := range []string{"node=a" + strings.Repeat(",a", maxValues), strings.Repeat("a ", maxValues+1)} {
		check.Errorf(t, must.Err(Parse(text)), "the filter has more than 256 values", "%.8s…", text)
	}
	check.OKf(t, must.Err(Parse(strings.Repeat("a ", maxValues))), "as many words as a filter may have")
}

func TestJoin(t *testing.T) {
	for _, tt := range []struct {
		args []string
		want string
	}{
		{[]string{"service=shop/cart", "bytes>1MB"}, "service=shop/cart bytes>1MB"},
		{[]string{"pod=a b"}, `pod="a b"`},
		{[]string{`pod="a b"`}, `pod="a b"`},
		{[]string{"service=a bytes>1"}, "service=a bytes>1"},
	} {
		check.Equalf(t, Join(tt.args), tt.want, "%q", tt.args)
	}
}

// Match runs on event loops when connections are ended.
func TestMatchAllocatesNothing(t *testing.T) {
	f, err := Parse("service=shop/cart endpoint=10.1.0.0/16 tried=10.1.0.4 bytes>1MB end=endpoint_reset cart-2 shop/cart:http shop/cart-2 10.1.0.5 error=timeout")
	must.OK(t, err)
	r := sample()
	if n := testing.AllocsPerRun(100, func() {
		if !f.Match(r) {
			t.Fatal("no match")
		}
	}); n != 0 {
		t.Errorf("%.0f allocations", n)
	}
}

// The documentation lists every field, and no other.
func TestDocumentedFields(t *testing.T) {
	text, err := os.ReadFile("../../docs/admin-api.md")
	must.OK(t, err)
	_, table, _ := strings.Cut(string(text), "| field | value |")
	var documented []string
	for line := range strings.Lines(table) {
		cell, _, _ := strings.Cut(strings.TrimPrefix(line, "| "), " | ")
		for i, name := range strings.Split(cell, "`") {
			if i%2 == 1 {
				documented = append(documented, name)
			}
		}
	}
	for _, name := range documented {
		if fields[name] == nil {
			t.Errorf("the documentation has a field %q that does not exist", name)
		}
	}
	if len(documented) != len(fields) {
		t.Errorf("the documentation lists %d fields %v, want %v", len(documented), documented, Fields())
	}
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"service=shop/cart bytes>1MB", `pod="a b",c`, "client=10.0.0.0/8,[fd00::1]:80 vip=:1-2", "attempts=1..3", `x"`, "=,", "duration<1ms", "\v"} {
		f.Add(seed)
	}
	r := sample()
	f.Fuzz(func(t *testing.T, text string) {
		parsed, err := Parse(text)
		if err != nil {
			e, ok := err.(*Error)
			if !ok || e.At < 0 || e.At > e.End || e.End > len(e.Filter) {
				t.Fatalf("%q: error %#v", text, err)
			}
			_ = e.Pointer()
			return
		}
		again, err := Parse(parsed.String())
		must.OKf(t, err, "%q: parsed, but not %q", text, parsed)
		must.Equalf(t, parsed.Match(r), again.Match(r), "%q and %q differ", text, again)
	})
}

// What only the transports of open connections say selects no records of ended ones.
func TestFieldsOfTransports(t *testing.T) {
	r := sample()
	ms := func(n int64) conntrack.Side { return conntrack.Side{RTT: n * int64(time.Millisecond)} }
	r.SetTransport(&conntrack.Transport{Idle: int64(time.Minute), Client: ms(20), Endpoint: ms(5)})
	for text, want := range map[string]bool{
		"idle>1s": true, "idle>5m": false, "idle!=1m": false, "retransmits>0": false,
		"client_rtt=20ms": true, "client_rtt<20ms": false, "endpoint_rtt=5ms": true, "endpoint_rtt>5ms": false,
	} {
		f := must.Get(Parse(text))(t)
		check.Equalf(t, f.Match(r), want, "%s", text)
		check.Equalf(t, f.Match(sample()), text == "idle!=1m", "%s, without a transport", text)
		check.Equalf(t, f.NeedsTransport(), true, "%s", text)
		check.Errorf(t, must.Err(ParseForRecords(text)), "is known of open connections alone", "%s", text)
	}
	check.Equal(t, must.Get(Parse("client=10.2.3.4"))(t).NeedsTransport(), false)
}

// Only a proxy knows the pods of clients: until it names them, no client has one.
func TestPodsOfClients(t *testing.T) {
	f := must.Get(Parse("client_pod=shop/web-*"))(t)
	check.Equal(t, f.NamesClients(), true)
	check.Equal(t, must.Get(Parse("pod=shop/web-*"))(t).NamesClients(), false)
	check.Equal(t, f.Match(sample()), false)
	f.NameClients(func(a netip.Addr) service.Name {
		return map[netip.Addr]service.Name{netip.MustParseAddr("10.2.3.4"): {Namespace: "shop", Name: "web-1"}}[a]
	})
	check.Equal(t, f.Match(sample()), true)
	other := sample()
	other.Client = netip.MustParseAddrPort("10.2.3.5:40000")
	check.Equal(t, f.Match(other), false)
}

// A list of Services and endpoints keeps the terms that these decide. all is false where the
// filter has others, empty is true where it has no such term.
func TestConfigured(t *testing.T) {
	r := &conntrack.Record{Port: sample().Port, VIP: sample().VIP, Endpoint: sample().Endpoint}
	for _, tt := range []struct {
		filter            string
		all, empty, match bool
	}{
		{"", true, true, true},
		{"service=shop/cart vip=:80 pod=cart-2 zone=Z2 tried=10.1.0.5 10.1.0 node-b", true, false, true},
		{"service=shop/cart pod!=cart-2", true, false, false},
		{"bytes>1TB client=10.9.9.9", false, true, true},
		{"bytes>1TB service=shop/cart", false, false, true},
		{"service=other state=open", false, false, false},
	} {
		f := must.Get(Parse(tt.filter))(t)
		part, all := f.Configured()
		got := [...]bool{all, part.IsEmpty(), part.Match(r), f.IsEmpty()}
		check.Equalf(t, got, [...]bool{tt.all, tt.empty, tt.match, tt.filter == ""}, "%s", tt.filter)
		check.Equal(t, part.String(), tt.filter)
	}
}
