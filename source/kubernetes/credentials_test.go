package kubernetes

import (
	"context"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/rs/zerolog"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/wait"
)

const secretToken = "eyJhbGciOiJSUzI1NiJ9.secret"

// kubeconfig writes a kubeconfig with a token, for a server with a CA or without
// one.
func kubeconfig(t *testing.T, server string, ca []byte) string {
	t.Helper()
	dir := t.TempDir()
	cluster := "server: " + server
	if ca != nil {
		file := filepath.Join(dir, "ca.crt")
		if err := os.WriteFile(file, ca, 0o600); err != nil {
			t.Fatal(err)
		}
		cluster += ", certificate-authority: " + file
	}
	name := filepath.Join(dir, "kubeconfig")
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: a, cluster: {%s}}]
users: [{name: a, user: {token: %s}}]
contexts: [{name: a, context: {cluster: a, user: a}}]
current-context: a
`, cluster, secretToken)
	if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return name
}

// TestTokenGoesToItsServerAlone has a server with a certificate that the
// kubeconfig's CA has not signed, and one without TLS, named by the kubeconfig or
// by --master: neither gets the token, and the log, at its most verbose, does not
// hold it. A server of the right CA gets it.
func TestTokenGoesToItsServerAlone(t *testing.T) {
	var tokens, requests atomic.Int32
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		requests.Add(1)
		if r.Header.Get("Authorization") != "" {
			tokens.Add(1)
		}
		http.Error(w, "no", http.StatusForbidden)
	})
	server := httptest.NewUnstartedServer(answer)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	plain := httptest.NewServer(answer)
	defer plain.Close()
	right := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	run := func(url, master string, ca []byte, until func(log string) error) {
		t.Helper()
		client, err := Connect(Connection{Kubeconfig: kubeconfig(t, url, ca), Master: master, QPS: 1000, Burst: 1000})
		if err != nil {
			t.Fatal(err)
		}
		log := &logBuffer{}
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() {
			defer close(done)
			_ = New(client, Options{NodeName: "node", Logger: zerolog.New(log).Level(zerolog.TraceLevel)}).Run(ctx, func(service.Change) {})
		}()
		wait.For(t, "the server is asked", 20*time.Second, func() error { return until(log.String()) })
		cancel()
		<-done
		if strings.Contains(log.String(), secretToken) {
			t.Errorf("the log holds the token:\n%s", log)
		}
	}
	run(server.URL, "", nil, func(log string) error {
		if !strings.Contains(log, "certificate") {
			return fmt.Errorf("no word of the certificate in the log:\n%s", log)
		}
		return nil
	})
	asked := func(string) error {
		if requests.Load() == 0 {
			return errors.New("no request has come")
		}
		return nil
	}
	run(plain.URL, "", nil, asked)
	requests.Store(0)
	run(server.URL, plain.URL, nil, asked)
	if n := tokens.Load(); n != 0 {
		t.Errorf("a server of another CA, or without TLS, got the token %d times", n)
	}
	run(server.URL, "", right, func(string) error {
		if tokens.Load() == 0 {
			return errors.New("the token has not come")
		}
		return nil
	})
}
