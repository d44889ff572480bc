//go:build cluster

package cluster

import (
	"fmt"
	"os"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/test/must"
)

// testPortsTaken starts the program while other programs have the ports of
// /metrics and of /healthz. With --bind-address-hard-fail it exits. Otherwise it
// serves, logs the conflict, and takes the ports when they are free.
func testPortsTaken(t *testing.T, w *world) {
	w = w.with(t, "n")
	w.grant(rights(deployedRole(t)))
	for _, port := range []struct{ name, address, hard, soft, page string }{
		{"metrics", "127.0.0.1:10249", "metrics address 127.0.0.1:10249: ", "the metrics are not served; trying again", "http://127.0.0.1:10249/metrics"},
		{"healthz", "0.0.0.0:10256", "/healthz and /livez: ", "0.0.0.0:10256: bind: address already in use", "http://127.0.0.1:10256/livez"},
	} {
		t.Run(port.name, func(t *testing.T) {
			w := w.with(t, w.namespace)
			l := must.Get(w.hosts.Node.Listen("tcp", port.address))(t)
			defer l.Close()
			args := []string{"run", "--kubeconfig", w.kubeconfig("sluice"), "--hostname-override", "node", "--access-log", "off"}
			says := func(program, text string) {
				t.Helper()
				w.until(program+" says "+text, func() error {
					if said := w.said(program); !strings.Contains(said, text) {
						return fmt.Errorf("it says\n%s", said)
					}
					return nil
				})
			}

			hard := "hard-" + port.name
			cmd := w.start(hard, os.Getenv("SLUICE_BIN"), append(args, "--bind-address-hard-fail")...)
			if err := cmd.Wait(); err == nil || cmd.ProcessState.ExitCode() != 1 {
				t.Errorf("with --bind-address-hard-fail it ended with %v", err)
			}
			says(hard, port.hard)
			says(hard, "address already in use")

			soft := "soft-" + port.name
			cmd = w.start(soft, os.Getenv("SLUICE_BIN"), args...)
			defer stop(cmd)
			says(soft, port.soft)
			says(soft, " ready ")
			_ = l.Close()
			w.until("the port is taken once it is free", func() error { return w.wantStatus(port.page, "200 ") })
		})
	}
}
