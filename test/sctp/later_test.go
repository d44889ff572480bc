package sctp

import (
	"context"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/vm"
	"github.com/sluice-proxy/sluice/test/wait"
)

// On a kernel without SCTP the other ports are served; the log says once what is missing,
// doctor and a metric say it too. Once the module is loaded, SCTP is served.
func TestModuleComesLater(t *testing.T) {
	if os.Getenv("SLUICE_SCTP_LATER") == "" {
		t.Skip("SKIP-NEEDS: a kernel that has not loaded SCTP yet")
	}
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	b.WitnessTCP(t, 8080)
	p := startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}},
		svc{name: "other", ip: "10.96.0.11", endpoints: []string{b.IPv4.String()}},
	), "--metrics-bind-address", "127.0.0.1:10249")
	tcp := func() error {
		c, err := lab.Client.Dial("tcp", "10.96.0.10:80")
		if err == nil {
			_ = c.Close()
		}
		return err
	}
	missing := func() string {
		var text []byte
		err := lab.Node.Do(func() error {
			transport := &http.Transport{DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
				return lab.Node.Dial(network, address)
			}}
			defer transport.CloseIdleConnections()
			r, err := (&http.Client{Transport: transport}).Get("http://127.0.0.1:10249/metrics")
			if err == nil {
				text, err = io.ReadAll(r.Body)
				_ = r.Body.Close()
			}
			return err
		})
		if err != nil {
			return err.Error()
		}
		for line := range strings.Lines(string(text)) {
			if value, is := strings.CutPrefix(line, "sluice_sctp_ports_missing "); is {
				return strings.TrimSpace(value)
			}
		}
		return "no such metric"
	}
	check.OKf(t, tcp(), "TCP without SCTP")
	counts := func(want string) {
		t.Helper()
		wait.Equal(t, "sluice_sctp_ports_missing", patience, want, missing)
	}
	counts("2")
	if out, _ := exec.Command(os.Getenv(programEnv), "doctor").CombinedOutput(); !strings.Contains(string(out), "missing  SCTP") {
		t.Errorf("doctor said:\n%s", out)
	}
	const says = "SCTP ports refuse: this kernel has no SCTP"
	must.OK(t, vm.LoadModules("sctp", "hmac"))
	serve(t, b.Namespace, at(b), options(), echo)
	began := time.Now()
	wait.For(t, "SCTP is served", patience, func() error {
		a, err := dial(lab.Client.Namespace, "10.96.0.11:3868", options())
		if err != nil {
			return err
		}
		defer a.abort()
		if err := a.send(note{text: []byte("hello")}); err != nil {
			return err
		}
		_, err = a.receive()
		return err
	})
	t.Logf("served %v after the module was loaded", time.Since(began))
	if n := strings.Count(p.said(), says); n != 1 {
		t.Errorf("the log says %d times: %q\n%s", n, says, p.said())
	}
	check.OKf(t, tcp(), "TCP with SCTP")
	counts("0")
}
