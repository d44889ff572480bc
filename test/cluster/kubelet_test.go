//go:build cluster

package cluster

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"sync/atomic"
	"testing"

	"github.com/sluice-proxy/sluice/test/execserver"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// kubeletPort is where the API server finds the kubelet of a node.
const kubeletPort = 10250

// kubelet answers the exec requests of the API server: it runs the command in the host's
// network namespace in place of a container.
type kubelet struct {
	t       *testing.T
	host    *netns.Host
	running atomic.Int32 // commands
}

// startKubelet starts the kubelet of a host.
func startKubelet(t *testing.T, host *netns.Host) *kubelet {
	t.Helper()
	k := &kubelet{t: t, host: host}
	l := must.Get(host.Listen("tcp", at(host.IPv4.String(), kubeletPort)))(t)
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { execserver.Serve(w, r, k.run) }))
	_ = server.Listener.Close()
	server.Listener, server.TLS = l, &tls.Config{}
	server.Config.TLSNextProto = map[string]func(*http.Server, *tls.Conn, http.Handler){} // no HTTP/2: it has no upgrades
	server.StartTLS()
	t.Cleanup(func() { server.CloseClientConnections() })
	return k
}

// run runs a command. Its input ends with ctx, as a container runtime does it.
func (k *kubelet) run(ctx context.Context, command []string, stdin io.Reader, stdout, stderr io.Writer) error {
	if len(command) == 0 || command[0] != "sluice" {
		return errors.New("executable file not found in $PATH")
	}
	cmd := k.host.Command(k.t, os.Getenv("SLUICE_BIN"), command[1:]...)
	cmd.Stdout, cmd.Stderr = stdout, stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	k.running.Add(1)
	defer k.running.Add(-1)
	stop := context.AfterFunc(ctx, func() { _ = in.Close() })
	defer stop()
	go func() {
		_, _ = io.Copy(in, stdin)
		_ = in.Close()
	}()
	return cmd.Wait()
}
