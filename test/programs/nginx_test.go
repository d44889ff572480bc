//go:build programs

package programs

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/debian"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
)

// nginx runs nginx on a backend, with the files of a directory.
func (w *world) nginx(h *netns.Host, root string) *server {
	w.t.Helper()
	dir := debian.Directory(w.t)
	config := fmt.Sprintf(`daemon off;
pid %[1]s/pid;
master_process off;
error_log stderr;
events { worker_connections 512; }
http {
  access_log off;
  sendfile on;
  send_timeout 600s;
  client_body_temp_path %[1]s/body;
  proxy_temp_path %[1]s/proxy;
  fastcgi_temp_path %[1]s/fastcgi;
  uwsgi_temp_path %[1]s/uwsgi;
  scgi_temp_path %[1]s/scgi;
  server {
    listen %[2]d;
    listen [::]:%[2]d ipv6only=on;
    root %[3]s;
    location = /hello { return 200 "hello from %[4]s\n"; }
  }
}
`, dir, w.port, root, h.Name())
	file := filepath.Join(dir, "nginx.conf")
	must.OK(w.t, os.WriteFile(file, []byte(config), 0o644))
	return w.serve(h, dir, "nginx", "-e", "stderr", "-p", dir, "-c", file)
}

// hello asks once, on a new connection, and returns who answered.
func (w *world) hello(vip string) (string, error) {
	c, err := w.dial(vip)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	body, err := get(c, "/hello")
	if err != nil {
		return "", err
	}
	defer body.Close()
	text, err := io.ReadAll(body)
	if err == nil && len(text) == 0 {
		err = errors.New("an empty answer")
	}
	return string(text), err
}

// get requests a path and returns the body.
func get(c net.Conn, path string) (io.ReadCloser, error) {
	if _, err := fmt.Fprintf(c, "GET %s HTTP/1.1\r\nHost: program\r\nConnection: close\r\n\r\n", path); err != nil {
		return nil, err
	}
	response, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		_ = response.Body.Close()
		return nil, errors.New(response.Status)
	}
	return response.Body, nil
}

// TestDownloads has five clients download a large file at once, one of which stops
// reading for longer than a minute. All must get every byte.
func TestDownloads(t *testing.T) {
	size := 50 << 20
	if full() {
		size = 500 << 20
	}
	w := newWorld(t, 1, 8080)
	root := debian.Directory(t)
	want := bigFile(t, filepath.Join(root, "big"), size)
	w.nginx(w.Backends[0], root)
	for i := range 5 {
		t.Run(fmt.Sprint(i), func(t *testing.T) {
			t.Parallel()
			c := must.Get(w.dial(vips[i%2]))(t)
			defer c.Close()
			body := must.Get(get(c, "/big"))(t)
			defer body.Close()
			sum := sha256.New()
			began := time.Now()
			n := must.Get(io.CopyN(sum, body, 10<<20))(t)
			if i == 0 {
				pause(longPause())
			}
			rest, err := io.Copy(sum, body)
			if err != nil || n+rest != int64(size) || [32]byte(sum.Sum(nil)) != want {
				t.Errorf("%d bytes of %d, or others: %v", n+rest, size, err)
			}
			t.Logf("%d MB in %v", size>>20, time.Since(began).Round(time.Millisecond))
		})
	}
}

// bigFile writes a file and returns its checksum.
func bigFile(t *testing.T, path string, size int) [32]byte {
	t.Helper()
	f := must.Get(os.Create(path))(t)
	defer f.Close()
	sum := sha256.New()
	must.OK(t, must.Err(io.CopyN(io.MultiWriter(f, sum), rand.NewChaCha8([32]byte{1}), int64(size))))
	must.OK(t, os.Chmod(path, 0o644))
	return [32]byte(sum.Sum(nil))
}

// enough is how many requests are made before and after an endpoint ends.
const enough = 300

// TestRestartOfTheOnlyEndpoint restarts nginx under load, with almost a second
// between its end and its start. No client that connects in the meantime may
// notice. Attempts go on for fifteen seconds, as nginx may be slow to start.
func TestRestartOfTheOnlyEndpoint(t *testing.T) {
	w := newWorld(t, 1, 8080, "--dial-timeouts", "5s,5s,5s")
	s := w.nginx(w.Backends[0], debian.Directory(t))
	for range 3 {
		l := newLoad(8, func(i int) error {
			_, err := w.hello(vips[i%2])
			return err
		})
		l.served(t, enough)
		s.end(syscall.SIGQUIT)
		ended := time.Now()
		pause(600 * time.Millisecond)
		s.start()
		l.served(t, enough)
		w.judge(l.stop(), ended)
	}
}

// TestOneOfTwoEndpointsIsKilled kills one nginx of two under load. The other one
// must serve all later connections.
func TestOneOfTwoEndpointsIsKilled(t *testing.T) {
	w := newWorld(t, 2, 8080)
	servers := []*server{w.nginx(w.Backends[0], debian.Directory(t)), w.nginx(w.Backends[1], debian.Directory(t))}
	for _, s := range servers {
		l := newLoad(8, func(i int) error {
			_, err := w.hello(vips[i%2])
			return err
		})
		l.served(t, enough)
		s.end(syscall.SIGKILL)
		killed := time.Now()
		l.served(t, enough)
		w.judge(l.stop(), killed)
		s.start()
	}
}
