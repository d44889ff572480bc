package e2e

import (
	"fmt"
	"net"
	"net/netip"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/output"
	"github.com/sluice-proxy/sluice/test/wait"
)

// observed is what the commands of docs/observing.md say in the test's world. An empty
// text is for those that have nothing to say there.
var observed = map[string]string{
	"conns client=10.1.0.2 -o wide":                           "default/web-1",
	"conns client_pod=default/web-1":                          "no open connection matches",
	"tap client_pod=default/web-1":                            "",
	"tap client=10.1.0.2":                                     "default/web",
	"log client=10.1.0.2":                                     "-> 10.96.0.10:80",
	"log --since 1h service=default/web":                      "client_reset",
	"log --since 1h end=endpoint_reset,connect_failed -o csv": "time,id,",
	"story 17":                                        "verdict     this node: Sluice ended the connection: admin", // it is ended by then
	"conns 'idle>5m' --sort=-idle -o wide":            "no open connection matches",
	"conns 'rtt>50ms'":                                "no open connection matches",
	"conns 'retransmits>0' --sort=-retransmits":       "no open connection matches",
	"conns 'unacked>64KiB' -o wide":                   "no open connection matches",
	"log --since 1h 'retransmits>10'":                 "",
	"tap 'rtt>50ms'":                                  "",
	"conns pod=default/web-1":                         "default/web-1",
	"pcap service=default/web --for 1m -w cart.pcap":  "packets of",
	"pcap end=endpoint_reset --for 1m -w resets.pcap": "0 packets of 0 connections",
	"conns client=10.1.0.2 -o tcpdump":                "no open connection matches",
	"drain default/web-1":                             "(default/web-1)",
	"drain":                                           "(default/web-1)",
	"close pod=default/web-1":                         "ended 1 connection",
	"conns --sort=-duration --limit 20":               "no open connection matches", /* they are closed by then */
	"top --by client --sort bytes":                    "10.1.0.2",
	"tap 'connect>100ms'":                             "",
	"tap 'first_byte>1s connect<10ms'":                "",
	"top --sort connect":                              "default/web",
	"top --by endpoint --sort first":                  "default/web-1",
	"top --sort failed":                               "default/web",
	"services":                                        "10.96.0.10,fd00:96::10  4/4",
	"services namespace=shop":                         "no Service matches",
	"endpoints service=default/web":                   "  ready",
	"slow":                                            "no endpoint is slow",
	"tap 'failures>0' -o json":                        `"error":"refused"`,
	"failures":                                        "refused",
	"tap end=no_endpoints,no_local_endpoints,unknown_port,unknown_address,not_admitted": "unknown_port",
	"failures --each":                                         "refused",
	"conns state=connecting -o json":                          "",
	"tap end=client_reset,endpoint_reset service=default/web": "client_reset",
	"explain --from 10.1.0.2 --to 10.96.0.10:80":              "endpoints: ",
	"destinations 10.96.0.10":                                 "steered",
	"status":                                                  "all is in force",
	"status --set-v 4 --for 10m":                              "verbosity 4",
}

// documentedCommands returns the sluice commands of the page's table, without what
// their output is piped to, and with the names and addresses of the test's world.
func documentedCommands(t *testing.T) []string {
	t.Helper()
	text := must.Read(t, "../../docs/observing.md")
	names := strings.NewReplacer("shop/cart-2", "default/web-1", "shop/cart", "default/web", "10.1.2.3", "10.1.0.2")
	var all []string
	for _, line := range strings.Split(string(text), "\n") {
		if !strings.HasPrefix(line, "| ") {
			continue
		}
		for _, m := range regexp.MustCompile("`sluice ([^`]*)`").FindAllStringSubmatch(line, -1) {
			command, _, _ := strings.Cut(m[1], ` \| `)
			if command = names.Replace(command); !strings.HasPrefix(command, "web") && !strings.HasPrefix(command, "demo") {
				all = append(all, command)
			}
		}
	}
	return all
}

// documentedPrograms returns the commands of the page's table that other programs run, or that
// read what sluice says: jq, curl.
func documentedPrograms(t *testing.T) (all []string) {
	t.Helper()
	for line := range strings.Lines(string(must.Read(t, "../../docs/observing.md"))) {
		for _, m := range regexp.MustCompile("`(?:sluice [^`]* -o json \\\\\\| )?((?:jq|curl) [^`]*)`").FindAllStringSubmatch(line, -1) {
			if strings.HasPrefix(line, "| ") {
				all = append(all, strings.NewReplacer(`\|`, "|", "10.1.2.3", "10.1.0.2").Replace(m[1]))
			}
		}
	}
	return all
}

// TestObservingCommands runs each command of docs/observing.md.
func TestObservingCommands(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080) // the other one refuses
	p := startProxy(t, lab, []webService{webOn(lab)}, "--record-tcp")
	commands := documentedCommands(t)
	if len(commands) < 15 {
		t.Fatalf("only %q", commands)
	}
	for _, c := range commands {
		if _, is := observed[c]; !is {
			t.Errorf("sluice %s: the test does not know what to expect", c)
		}
	}
	// Those that go on run from before the traffic until they have said what they should.
	type follower struct {
		command string
		cmd     *netns.Cmd
		out     *output.Text
	}
	var followers []*follower
	for _, c := range commands {
		if !strings.HasPrefix(c, "tap") && !strings.HasPrefix(c, "top") {
			continue
		}
		f := &follower{c, lab.Node.Command(t, "sh", "-c", `exec "$0" `+c, built(t)), &output.Text{}}
		f.cmd.Stdout, f.cmd.Stderr = f.out, f.out
		must.OK(t, lab.Node.Do(f.cmd.Start))
		t.Cleanup(func() { _ = f.cmd.Process.Kill(); _ = f.cmd.Wait() })
		followers = append(followers, f)
	}
	address := addresses(80, vip4)[0]
	held := hold(t, lab.Client, address, 1)
	for _, f := range followers {
		wait.For(t, "sluice "+f.command+" says "+observed[f.command], startTimeout, func() error {
			if _, err := lab.Client.Ask("tcp", address); err != nil {
				return err
			}
			_, _ = lab.Client.Ask("tcp", addresses(81, vip4)[0]) // it is refused
			c := hold(t, lab.Client, address, 1)[0]
			if tcp, ok := c.(*net.TCPConn); ok {
				_ = tcp.SetLinger(0)
			}
			_ = c.Close()
			if out := f.out.String(); !strings.Contains(out, observed[f.command]) {
				return fmt.Errorf("it says %q", out)
			}
			return nil
		})
	}
	alive(t, held)
	p.awaitOpen(len(held)) // that one, which a command ends
	id := strconv.FormatUint(awaitListed(t, lab, "").ID, 10)
	for _, c := range commands {
		if strings.HasPrefix(c, "tap") || strings.HasPrefix(c, "top") {
			continue
		}
		run := strings.Replace(c, "story 17", "story "+id, 1)
		if strings.HasPrefix(c, "close") {
			run += " --yes"
		}
		if c == "slow" {
			run += " --for 1s"
		}
		run = strings.Replace(run, "--for 1m -w ", "--for 1s -w "+t.TempDir()+"/", 1)
		out, err := lab.Node.Command(t, "sh", "-c", `exec "$0" `+run, built(t)).CombinedOutput()
		if err != nil || !strings.Contains(string(out), observed[c]) {
			t.Errorf("sluice %s: %v, want %q:\n%s", run, err, observed[c], out)
		}
	}
	for _, f := range followers {
		if out := f.out.String(); strings.Contains(out, "sluice:") {
			t.Errorf("sluice %s: %s", f.command, out)
		}
	}
	var tapped string
	for _, f := range followers {
		if strings.HasSuffix(f.command, "-o json") {
			tapped = f.out.String()
		}
	}
	refusing := netip.AddrPortFrom(lab.Backends[1].IPv4, 8080).String()
	programs := map[string]string{"access.log": `"client": "10.1.0.2:`, "uniq -c": refusing + " refused", "/v1/config": `"dial-timeouts"`}
	for _, c := range documentedPrograms(t) {
		known := false
		for part, want := range programs {
			if !strings.HasSuffix(c, part) {
				continue
			}
			known = true
			delete(programs, part)
			run := strings.NewReplacer("access.log", p.accessLog, "/run/sluice/admin.sock", fmt.Sprintf("/run/sluice/admin-%d.sock", p.namespace())).Replace(c)
			cmd := lab.Node.Command(t, "sh", "-c", run)
			cmd.Stdin = strings.NewReader(tapped)
			if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), want) {
				t.Errorf("%s: %v, want %q:\n%s", run, err, want, out)
			}
		}
		if !known {
			t.Errorf("%s: the test does not know what to expect", c)
		}
	}
	if len(programs) > 0 {
		t.Errorf("docs/observing.md lacks %v", programs)
	}
}
