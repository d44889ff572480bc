package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// turnedAway is a client's attempt that reaches no endpoint, and what the commands report of it.
type turnedAway struct {
	to, service, reason string
}

// TestRefusalsAreTold: what is refused or dropped is a metric by reason, a line of sluice tap
// and sluice failures with client, Service and reason, and a record where a flag asks for it.
func TestRefusalsAreTold(t *testing.T) {
	t.Parallel()
	for _, m := range modes {
		switch m.name {
		case "sklookup-nftables", "tproxy-nftables", "sklookup": // the others do not count
			for _, path := range []string{"relay", "kernel"} {
				t.Run(m.name+"/"+path, func(t *testing.T) {
					t.Parallel()
					refusalsAreTold(t, m, path)
				})
			}
		}
	}
}

func refusalsAreTold(t *testing.T, m mode, path string) {
	lab := netns.NewLab(t, 1)
	web := webOn(lab)
	none, elsewhere := web, web
	none.name, none.vips, none.endpoints = "none", []string{"10.96.0.11", "fd00:96::11"}, nil
	elsewhere.name, elsewhere.vips, elsewhere.local = "elsewhere", []string{"10.96.0.12", "fd00:96::12"}, true
	lab.Backends[0].EchoTCP(t, 8080)
	limited := web
	limited.name, limited.vips = "limited", []string{"10.96.0.13", "fd00:96::13"}
	p := prepareProxy(t, lab, []webService{web, none, elsewhere})
	p.mode = m
	p.write("limited.yaml", strings.NewReplacer(
		"type: ClusterIP", "type: LoadBalancer\n  loadBalancerSourceRanges: [192.0.2.0/24]",
		"spec:\n", "status: {loadBalancer: {ingress: [{ip: 203.0.113.10}]}}\nspec:\n").Replace(limited.yaml()))
	p.start("--access-log-refusals", "--service-cidr", "10.96.0.0/16,fd00:96::/112", "--datapath", path)
	records := tap(t, lab)
	wait.For(t, "the tap sees a connection that is served", startTimeout, func() error {
		if v := ask(lab.Client, addresses(80, vip4)[0]); v.err != nil {
			return v.err
		}
		select {
		case r := <-records:
			check.Equalf(t, r.Event, "", "the event of a connection that was served")
			return nil
		default:
			return errNotYet
		}
	})
	attempts := []turnedAway{
		{"10.96.0.11:80", "default/none:http", "no_endpoints"},
		{"[fd00:96::11]:80", "default/none:http", "no_endpoints"},
		{"10.96.0.12:80", "default/elsewhere:http", "no_local_endpoints"},
		{vip4 + ":81", "", "unknown_port"},
		{"10.96.7.7:80", "", "unknown_address"},
	}
	if path == "kernel" { // else the listening socket's filter drops it uncounted
		attempts = append(attempts, turnedAway{"203.0.113.10:80", "default/limited:http", "not_admitted"})
	}
	for _, c := range attempts {
		before := refusedPackets(t, p, c.reason)
		turnAway(lab.Client, c.to)
		r := tapped(t, records)
		for r.VIP.String() != c.to { // a SYN that was repeated, or another connection that was served
			r = tapped(t, records)
		}
		if got := (turnedAway{r.VIP.String(), r.Service, r.End}); r.Event != "refused" || got != c || r.Client.Addr() != lab.Client.IPv4 && r.Client.Addr() != lab.Client.IPv6 {
			t.Errorf("sluice tap says %s of %s to %v, want %v", r.Event, r.Client, got, c)
		}
		if after := refusedPackets(t, p, c.reason); after <= before {
			t.Errorf("%s: %v packets, %v before", c.reason, after, before)
		}
		wantListed(t, lab, c)
	}
	p.stop()
	written := 0
	for _, r := range p.records() {
		if r.End == "not_admitted" || strings.HasPrefix(r.End, "no_") || strings.HasPrefix(r.End, "unknown_") {
			written++
		}
	}
	if written < len(attempts) {
		t.Errorf("%d records of refusals", written)
	}
}

// turnAway connects, and ends when it is refused or not answered.
func turnAway(from *netns.Host, to string) {
	_ = from.Do(func() error {
		c, err := net.DialTimeout("tcp", to, 300*time.Millisecond)
		if err == nil {
			_ = c.Close()
		}
		return nil
	})
}

func refusedPackets(t *testing.T, p *proxy, reason string) float64 {
	t.Helper()
	m := must.Get(p.metrics())(t)
	return sumOf(m, "sluice_refused_packets_total", fmt.Sprintf("reason=%q", reason))
}

// wantListed expects sluice failures to begin with a refusal.
func wantListed(t *testing.T, lab *netns.Lab, c turnedAway) {
	t.Helper()
	wait.For(t, "sluice failures lists it", startTimeout, func() error {
		out, err := sluice(t, lab, "failures", "--each", "--limit", "1", "-o", "json")
		if err != nil {
			return err
		}
		var f api.Failure
		if err := json.Unmarshal([]byte(out), &f); err != nil {
			return fmt.Errorf("%w: %s", err, out)
		}
		if got := (turnedAway{f.VIP, f.Service, f.Error}); got != c || f.Packets == 0 {
			return fmt.Errorf("%+v", f)
		}
		return nil
	})
}
