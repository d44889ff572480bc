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
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/client-go/rest"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/output"
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
		must.OK(t, os.WriteFile(file, ca, 0o600))
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
	must.OK(t, os.WriteFile(name, []byte(text), 0o600))
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
		client := must.Get(Connect(Connection{Kubeconfig: kubeconfig(t, url, ca), Master: master, QPS: 1000, Burst: 1000}))(t)
		log := &output.Text{}
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
	check.Equalf(t, tokens.Load(), 0, "how often a server of another CA, or without TLS, got the token")
	run(server.URL, "", right, func(string) error {
		if tokens.Load() == 0 {
			return errors.New("the token has not come")
		}
		return nil
	})
}

// A master that is given without a kubeconfig gets the token of the pod's service
// account, as the account's own address is a cluster IP that this proxy has yet to
// serve. A master without TLS does not get it.
func TestMasterGetsTheTokenOfThePod(t *testing.T) {
	var token atomic.Value
	answer := http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { token.Store(r.Header.Get("Authorization")) })
	server := httptest.NewUnstartedServer(answer)
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	defer server.Close()
	plain := httptest.NewServer(answer)
	defer plain.Close()
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	inPod := func() (*rest.Config, error) {
		return &rest.Config{Host: "https://192.0.2.1:443", BearerToken: secretToken, TLSClientConfig: rest.TLSClientConfig{CAData: ca}}, nil
	}
	for _, test := range []struct{ name, master, want string }{
		{"with a scheme", server.URL, "Bearer " + secretToken},
		{"host and port", strings.TrimPrefix(server.URL, "https://"), "Bearer " + secretToken},
		{"without TLS", plain.URL, ""},
	} {
		config := must.Get(Connection{Master: test.master}.podConfig(inPod))(t)
		client := must.Get(rest.UnversionedRESTClientFor(unversioned(config)))(t)
		if err := client.Get().AbsPath("/version").Do(t.Context()).Error(); err != nil || token.Load() != test.want {
			t.Errorf("%s: the server has got %q, %v; want %q", test.name, token.Load(), err, test.want)
		}
	}
	outside := func() (*rest.Config, error) { return nil, rest.ErrNotInCluster }
	if config, err := (Connection{Master: "http://192.0.2.1"}).podConfig(outside); err != nil || config.Host != "http://192.0.2.1" {
		t.Errorf("outside of a cluster: %+v, %v", config, err)
	}
	check.ErrorIsf(t, must.Err((Connection{}).podConfig(outside)), ErrNoCluster, "outside of a cluster, without a master")
}

// unversioned completes a configuration for requests that name no API group.
func unversioned(c *rest.Config) *rest.Config {
	c.NegotiatedSerializer = serializer.NewCodecFactory(runtime.NewScheme()).WithoutConversion()
	return c
}

// A negative QPS is no limit, as kube-proxy has it of client-go; 0 is the default.
func TestLimitOfRequests(t *testing.T) {
	for _, test := range []struct {
		qps      float32
		want     float32
		limiting bool
	}{{0, defaultQPS, true}, {7, 7, true}, {-1, 0, false}} {
		config := must.Get(Connection{Master: "http://192.0.2.1", QPS: test.qps, Burst: 3}.config())(t)
		limiting := false
		for range 1000 {
			limiting = limiting || !config.RateLimiter.TryAccept()
		}
		if limiting != test.limiting || test.limiting && config.RateLimiter.QPS() != test.want {
			t.Errorf("QPS %v: limited %v, to %v", test.qps, limiting, config.RateLimiter.QPS())
		}
	}
}
