package e2e

import (
	"bufio"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// tappedRecord is a line of sluice tap.
type tappedRecord struct {
	record
	Event string `json:"event"`
}

// tap runs sluice tap on the node until the test ends.
func tap(t *testing.T, lab *netns.Lab, args ...string) <-chan tappedRecord {
	t.Helper()
	cmd := lab.Node.Command(t, built(t), append([]string{"tap", "-o", "json"}, args...)...)
	out := must.Get(cmd.StdoutPipe())(t)
	must.OK(t, lab.Node.Do(cmd.Start))
	records := make(chan tappedRecord, 1000)
	go func() {
		defer close(records)
		for lines := bufio.NewScanner(out); lines.Scan(); {
			var r tappedRecord
			if err := json.Unmarshal(lines.Bytes(), &r); err != nil {
				t.Errorf("%v: %s", err, lines.Text())
			}
			records <- r
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	return records
}

// tapped returns the next record of a tap.
func tapped(t *testing.T, records <-chan tappedRecord) tappedRecord {
	t.Helper()
	select {
	case r, ok := <-records:
		if ok {
			return r
		}
		t.Fatal("the tap has ended")
	case <-time.After(startTimeout):
		t.Fatal("the tap has no record")
	}
	return tappedRecord{}
}

// TestOperatorSeesAndEndsConnections lists open connections, sees them open and end,
// and ends those to one endpoint: clients are reset, the records say so, and the other
// connections go on.
func TestOperatorSeesAndEndsConnections(t *testing.T) {
	t.Parallel()
	const each = 6
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	records := tap(t, lab, "--opens", "service=default/web")
	held := hold(t, lab.Client, addresses(80, vip4)[0], each)
	var first tappedRecord
	wait.For(t, "the tap sees a connection", startTimeout, func() error {
		held = append(held, hold(t, lab.Client, addresses(80, vip4)[0], 1)...)
		select {
		case first = <-records:
			return nil
		default:
			return errNotYet
		}
	})
	if first.Event != "open" || first.End != "" || first.Service != "default/web:http" {
		t.Errorf("the tap says %+v", first)
	}
	// The kernel tells the process of a flow a moment after it has begun.
	wait.For(t, "all connections are listed", startTimeout, func() error {
		out, err := sluice(t, lab, "conns", "-o", "json", "service=default/web", "state=open")
		if n := strings.Count(out, `"state":"open"`); err == nil && n != len(held) {
			return fmt.Errorf("%d of %d: %s", n, len(held), out)
		}
		return err
	})
	dead := on(8080, lab.Backends[0])[0]
	out, err := sluice(t, lab, "conns", "-o", "wide", "endpoint="+dead.String())
	if err != nil || !strings.HasPrefix(out, "STATE") {
		t.Fatalf("%v: %s", err, out)
	}
	there := strings.Count(out, "\n") - 1
	if there == 0 || there == len(held) {
		t.Fatalf("%d of %d connections are on one endpoint:\n%s", there, len(held), out)
	}
	out, err = sluice(t, lab, "close", "endpoint="+dead.String(), "--dry-run")
	if want := fmt.Sprintf("%d connection", there); err != nil || !strings.HasPrefix(out, want) {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
	alive(t, held)
	out, err = sluice(t, lab, "close", "endpoint="+dead.String(), "--yes")
	if want := fmt.Sprintf("ended %d connection", there); err != nil || !strings.HasPrefix(out, want) {
		t.Errorf("%v: %s, want %s", err, out, want)
	}
	reset := make(map[netip.AddrPort]bool)
	for _, r := range p.awaitRecords(there) {
		if r.Endpoint != dead || r.End != "admin" {
			t.Errorf("a connection to %s ended with %s", r.Endpoint, r.End)
		}
		reset[r.Client] = true
	}
	for _, c := range held {
		if own := netip.MustParseAddrPort(c.LocalAddr().String()); reset[own] {
			if err := ended(c); !isReset(err) {
				t.Errorf("%s: ended with %v, want a reset", own, err)
			}
		} else if err := echoes(c); err != nil {
			t.Errorf("%s, to the other endpoint: %v", own, err)
		}
	}
	for {
		r := tapped(t, records)
		if r.Event == "open" {
			continue
		}
		check.Equalf(t, r.End, "admin", "the tap says that a connection ended with")
		if there--; there == 0 {
			break
		}
	}
	p.stop() // now all that it said has come
	if !p.stderr.Contains(`"filter":"endpoint=` + dead.String()) {
		t.Error("the log does not say who was ended")
	}
	if left, err := filepath.Glob("/run/sluice/*"); err == nil {
		for _, name := range left {
			if strings.Contains(name, fmt.Sprint(p.namespace())) {
				t.Errorf("%s is left", name)
			}
		}
	}
}

// TestDrainedEndpointGetsNoNewConnections drains an endpoint: its connections stay,
// new ones avoid it, and come back when it is taken back.
func TestDrainedEndpointGetsNoNewConnections(t *testing.T) {
	t.Parallel()
	const asks = 12
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	held := hold(t, lab.Client, addresses(80, vip4)[0], 4)
	served := func() map[string]int {
		names := make(map[string]int)
		for range asks {
			name := must.Get(lab.Client.Ask("tcp", addresses(80, vip4)[0]))(t)
			names[name]++
		}
		return names
	}
	must.Equalf(t, len(served()), 2, "endpoints serve")
	drained := on(8080, lab.Backends[0])[0].Addr().String()
	p.awaitOpen(len(held))
	out, err := sluice(t, lab, "drain", drained)
	if err != nil || !strings.Contains(out, "2 connections, of default/web:http") {
		t.Errorf("%v: %s", err, out)
	}
	if names := served(); len(names) != 1 {
		t.Errorf("%v serve, and one of them is drained", names)
	}
	alive(t, held)
	says(t, lab, "no endpoint is drained", "drain", drained, "--back")
	check.Equalf(t, len(served()), 2, "endpoints serve after one was taken back")
	says(t, lab, "all is in force", "status")
	p.kill()
	out, err = sluice(t, lab, "status")
	if err == nil || !strings.Contains(out, "no proxy runs in this network namespace") {
		t.Errorf("without a proxy: %v: %s", err, out)
	}
	says(t, lab, "admin socket", "cleanup")
}

// TestCommandsAskTheProxyOfTheirNamespace asks from a namespace without a proxy, and
// has commands ask that of their own.
func TestCommandsAskTheProxyOfTheirNamespace(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.Backends[0].EchoTCP(t, 8080) // nobody listens on the other one
	p := startProxy(t, lab, []webService{webOn(lab), {name: "dead", vips: []string{"10.96.0.81"}, port: 81}})
	socket := fmt.Sprintf("/run/sluice/admin-%d.sock", p.namespace())
	out, err := lab.Client.Command(t, built(t), "status").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no proxy runs in this network namespace") || !strings.Contains(string(out), socket+" (node ") {
		t.Errorf("from another namespace: %v: %s", err, out)
	}
	if out, err := lab.Client.Command(t, built(t), "status", "--admin-socket", socket).CombinedOutput(); err != nil || !strings.Contains(string(out), "all is in force") {
		t.Errorf("by the socket's name: %v: %s", err, out)
	}
	for range 4 {
		must.OK(t, must.Err(lab.Client.Ask("tcp", addresses(80, vip4)[0])))
	}
	for _, tt := range []struct{ args, want string }{
		{"failures --service default/web", lab.Backends[1].IPv4.String() + ":8080"},
		{"failures -o json", `"error":"refused"`},
		{"destinations default/web", "TCP       " + addresses(80, vip4)[0]},
		{"destinations --steering refused", "default/dead"},
		{"explain --from 10.9.9.9 --to " + addresses(80, vip4)[0], fmt.Sprintf("process %d", p.cmd.Process.Pid)},
		{"explain --from 10.9.9.9 --to " + addresses(80, vip4)[0], "endpoints: 2 of 2 are candidates"},
		{"explain --from 10.9.9.9 --to 10.96.0.81:81 -o json", `"verdict":"refuse"`},
	} {
		wait.For(t, "sluice "+tt.args+" says "+tt.want, startTimeout, func() error {
			if out, err := sluice(t, lab, strings.Fields(tt.args)...); err != nil || !strings.Contains(out, tt.want) {
				return fmt.Errorf("%v: %s", err, out)
			}
			return nil
		})
	}
	for _, args := range []string{"--admin-socket off", "--masquerade-all", "--admin-socket /run/sluice/none.sock"} {
		out, err := sluice(t, lab, append(strings.Fields("explain --from 10.9.9.9 --to 10.96.0.81:81"), strings.Fields(args)...)...)
		if err == nil || strings.Contains(out, "the running proxy answers") {
			t.Errorf("%s: %v: %s", args, err, out)
		}
	}
}

// TestOthersCannotAskTheProxy asks as a user who may not.
func TestOthersCannotAskTheProxy(t *testing.T) {
	lab := netns.NewLab(t, 1)
	lab.Backends[0].EchoTCP(t, 8080)
	startProxy(t, lab, []webService{webOn(lab)})
	program := filepath.Join(t.TempDir(), "sluice")
	for dir := filepath.Dir(program); dir != os.TempDir() && dir != "/"; dir = filepath.Dir(dir) {
		must.OK(t, os.Chmod(dir, 0o755))
	}
	must.Run(t, exec.Command("cp", built(t), program))
	out, err := lab.Node.Command(t, "setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", program, "conns").CombinedOutput()
	if err == nil || !strings.Contains(string(out), "no right to use /run/sluice/admin-") {
		t.Errorf("%v: %s", err, out)
	}
}
