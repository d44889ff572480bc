package pools

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/health"
	"google.golang.org/grpc/health/grpc_health_v1"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// kind is a kind of server with its clients.
type kind struct {
	name  string
	vip   string
	port  uint16
	serve func(t *testing.T, hosts []*netns.Host, port uint16)
	// clients returns n clients with a connection each. A call makes a request.
	clients func(t *testing.T, from *netns.Host, address string, n int) []func() error
}

var kinds = []kind{
	{"nginx", "10.96.0.10", 8080, serveNginx, httpClients},
	{"grpc", "10.96.0.11", 9000, serveGRPC, grpcClients},
	{"postgres", "10.96.0.12", 5432, servePostgres, postgresClients},
}

const (
	before, after = 3, 6 // endpoints
	idle          = 30   // connections of each kind that are idle meanwhile
)

// TestRebalanceFailsNoRequest: of each kind, 30 connections are idle and one is in use while
// three endpoints come to three. Idle ones are closed until each old endpoint has no more than
// its share. No request fails, neither meanwhile nor when the idle clients come back, and the
// new endpoints serve them too.
func TestRebalanceFailsNoRequest(t *testing.T) {
	netns.Require(t)
	lab := netns.NewLab(t, after)
	for _, k := range kinds {
		k.serve(t, lab.Backends, k.port)
		for _, b := range lab.Backends {
			wait.For(t, k.name+" accepts", wait.Patience, func() error {
				c, err := lab.Node.Dial("tcp", net.JoinHostPort(b.IPv4.String(), fmt.Sprint(k.port)))
				if err == nil {
					_ = c.Close()
				}
				return err
			})
		}
	}
	w := start(t, lab, before)
	clients := make(map[string][]func() error)
	var busy sync.WaitGroup
	stop := make(chan struct{})
	for _, k := range kinds {
		clients[k.name] = k.clients(t, lab.Client, net.JoinHostPort(k.vip, fmt.Sprint(k.port)), idle)
		used := k.clients(t, lab.Client, net.JoinHostPort(k.vip, fmt.Sprint(k.port)), 1)[0]
		request(t, k.name, clients[k.name])
		busy.Go(func() {
			for n := 0; ; n++ {
				if err := used(); err != nil {
					t.Errorf("%s: request %d of a client that is busy: %v", k.name, n, err)
					return
				}
				select {
				case <-stop:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
		})
	}
	began := time.Now()
	w.put(after)
	for _, k := range kinds {
		closed := 0.0
		wait.For(t, k.name+": idle connections are closed", 2*time.Minute, func() (err error) {
			closed, err = w.proxy.Metric("sluice_connections_closed_total", `service="`+k.name+`"`, `end="rebalanced"`)
			if err == nil && closed < idle/2-2 {
				err = fmt.Errorf("%v", closed)
			}
			return err
		})
		t.Logf("%s: %v of %d idle connections were closed within %v", k.name, closed, idle, time.Since(began).Round(time.Second))
		request(t, k.name, clients[k.name])
	}
	close(stop)
	busy.Wait()
	for _, k := range kinds {
		opened, err := w.proxy.Metric("sluice_connections_opened_total", `service="`+k.name+`"`)
		if err != nil || opened < idle+idle/3 {
			t.Errorf("%s: %v connections in all, %v: idle clients did not come back", k.name, opened, err)
		}
	}
}

// request makes a request of each client, all at once.
func request(t *testing.T, kind string, clients []func() error) {
	t.Helper()
	errs := make(chan error, len(clients))
	for _, ask := range clients {
		go func() { errs <- ask() }()
	}
	failed := 0
	for range clients {
		if err := <-errs; err != nil {
			failed++
			t.Errorf("%s: %v", kind, err)
		}
	}
	t.Logf("%s: %d of %d requests failed", kind, failed, len(clients))
}

func serveNginx(t *testing.T, hosts []*netns.Host, port uint16) {
	t.Helper()
	for _, h := range hosts {
		dir := debian.Directory(t)
		config := fmt.Sprintf(`daemon off;
pid %[1]s/pid;
master_process off;
error_log stderr;
events { worker_connections 512; }
http {
  access_log off;
  keepalive_timeout 3600s; keepalive_requests 1000000; # by default it closes a busy one after 1,000
  client_body_temp_path %[1]s/body; proxy_temp_path %[1]s/proxy; fastcgi_temp_path %[1]s/fastcgi; uwsgi_temp_path %[1]s/uwsgi; scgi_temp_path %[1]s/scgi;
  server { listen %[2]d; location / { return 200 "%[3]s"; } }
}
`, dir, port, h.Name())
		file := filepath.Join(dir, "nginx.conf")
		must.OK(t, os.WriteFile(file, []byte(config), 0o644))
		serve(t, h, dir, "nginx", "-e", "stderr", "-p", dir, "-c", file)
	}
}

func httpClients(t *testing.T, from *netns.Host, address string, n int) (all []func() error) {
	for range n {
		transport := &http.Transport{MaxIdleConnsPerHost: 1, DialContext: func(_ context.Context, network, address string) (net.Conn, error) {
			return from.Dial(network, address)
		}}
		t.Cleanup(transport.CloseIdleConnections)
		c := &http.Client{Transport: transport, Timeout: time.Minute}
		all = append(all, func() error {
			response, err := c.Get("http://" + address + "/")
			if err != nil {
				return err
			}
			defer response.Body.Close()
			text, err := io.ReadAll(response.Body)
			if err == nil && !strings.HasPrefix(string(text), "b") {
				err = fmt.Errorf("answer %q", text)
			}
			return err
		})
	}
	return all
}

func serveGRPC(t *testing.T, hosts []*netns.Host, port uint16) {
	t.Helper()
	for _, h := range hosts {
		l := must.Get(h.Listen("tcp", fmt.Sprintf(":%d", port)))(t)
		s := grpc.NewServer()
		grpc_health_v1.RegisterHealthServer(s, health.NewServer())
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() {
			s.Stop()
			if err := <-done; err != nil && !errors.Is(err, grpc.ErrServerStopped) {
				t.Error(err)
			}
		})
	}
}

func grpcClients(t *testing.T, from *netns.Host, address string, n int) (all []func() error) {
	t.Helper()
	for range n {
		c, err := grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()),
			grpc.WithContextDialer(func(_ context.Context, address string) (net.Conn, error) { return from.Dial("tcp", address) }))
		must.OK(t, err)
		t.Cleanup(func() { _ = c.Close() })
		all = append(all, func() error {
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			_, err := grpc_health_v1.NewHealthClient(c).Check(ctx, &grpc_health_v1.HealthCheckRequest{})
			return err
		})
	}
	return all
}

// servePostgres runs a database on each host, all made from one.
func servePostgres(t *testing.T, hosts []*netns.Host, port uint16) {
	t.Helper()
	first := filepath.Join(debian.Directory(t), "data")
	out, err := debian.As(hosts[0].Command(t, debian.Find(t, "initdb"), "-D", first, "-A", "trust", "-U", "postgres", "--no-sync"), filepath.Dir(first)).CombinedOutput()
	if err != nil {
		t.Fatalf("initdb: %v\n%s", err, out)
	}
	must.OK(t, os.WriteFile(filepath.Join(first, "pg_hba.conf"), []byte("host all all 0.0.0.0/0 trust\n"), 0o644))
	for _, h := range hosts {
		dir := debian.Directory(t)
		data := filepath.Join(dir, "data")
		if out, err := exec.Command("cp", "-a", first, data).CombinedOutput(); err != nil {
			t.Fatalf("cp: %v\n%s", err, out)
		}
		serve(t, h, dir, "postgres", "-D", data, "-p", fmt.Sprint(port), "-h", "0.0.0.0", "-k", dir,
			"-c", "fsync=off", "-c", "shared_buffers=8MB", "-c", "max_connections=60", "-c", "autovacuum=off")
	}
}

// postgresClients are those of one pool. Their requests take so long that each has a connection
// of its own.
func postgresClients(t *testing.T, from *netns.Host, address string, n int) (all []func() error) {
	t.Helper()
	config, err := pgxpool.ParseConfig("postgres://postgres@" + address + "/postgres?sslmode=disable")
	must.OK(t, err)
	config.MaxConns, config.MaxConnIdleTime, config.MaxConnLifetime = int32(n), time.Hour, time.Hour
	config.ConnConfig.DialFunc = func(_ context.Context, network, address string) (net.Conn, error) { return from.Dial(network, address) }
	var pool *pgxpool.Pool
	var conns []*pgxpool.Conn
	wait.For(t, "the database is ready", wait.Patience, func() error {
		if pool == nil {
			if pool, err = pgxpool.NewWithConfig(context.Background(), config); err != nil {
				return err
			}
			t.Cleanup(pool.Close)
		}
		for len(conns) < n {
			c, err := pool.Acquire(context.Background())
			if err != nil {
				return err
			}
			conns = append(conns, c)
		}
		return nil
	})
	for _, c := range conns {
		c.Release()
	}
	for range n {
		all = append(all, func() error {
			var one int // of requests that overlap
			ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
			defer cancel()
			return pool.QueryRow(ctx, "select 1 from pg_sleep(0.1)").Scan(&one)
		})
	}
	return all
}
