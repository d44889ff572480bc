package web

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/live/client"
	"github.com/sluice-proxy/sluice/live/socket"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
)

// echo answers with what it was asked.
func echo(w http.ResponseWriter, r *http.Request) {
	_, _ = fmt.Fprintf(w, "%s %s", r.Method, r.URL)
}

// page is the page at an address of loopback.
func page(t *testing.T, o Options) *httptest.Server {
	t.Helper()
	h := must.Get(New(o))(t)
	s := httptest.NewServer(h)
	t.Cleanup(s.CloseClientConnections)
	return s
}

// ask sends a request with some headers, "Host" among them.
func ask(t *testing.T, s *httptest.Server, method, path string, headers ...string) (*http.Response, string) {
	t.Helper()
	r := must.Get(http.NewRequestWithContext(t.Context(), method, s.URL+path, http.NoBody))(t)
	for i := 0; i < len(headers); i += 2 {
		r.Header.Set(headers[i], headers[i+1])
		if headers[i] == "Host" {
			r.Host = headers[i+1]
		}
	}
	resp := must.Get(s.Client().Do(r))(t)
	defer resp.Body.Close()
	body := must.Get(io.ReadAll(resp.Body))(t)
	return resp, string(body)
}

// A site whose name resolves to our address gets nothing, of the page and of the API.
func TestHosts(t *testing.T) {
	s := page(t, Options{API: http.HandlerFunc(echo), Hosts: []string{"Node-1.example.com", "192.0.2.7", "fd00::7"}})
	for host, want := range map[string]bool{
		"localhost": true, "localhost:9999": true, "LocalHost.": true, "sluice.localhost:80": true,
		"127.0.0.1": true, "127.0.0.1:8080": true, "127.9.9.9": true, "[::1]:8080": true, "[::1]": true,
		"node-1.example.com": true, "NODE-1.example.com.:8080": true, "192.0.2.7:8080": true, "[fd00::7]": true,
		"example.com": false, "attacker.example:8080": false, "localhost.attacker.example": false, "127.0.0.1.nip.example": false,
		"192.0.2.8": false, "10.0.0.1:8080": false, "[fd00::8]:80": false, "node-2.example.com": false, "0.0.0.0": false, "": false,
		"notlocalhost": false, "2130706433": false, "0x7f000001": false, "x@localhost": false,
	} {
		for _, path := range []string{"/", "/v1/status", "/js/main.js"} {
			resp, _ := ask(t, s, http.MethodGet, path, "Host", host)
			if host == "" { // net/http sends the URL's host then
				continue
			}
			check.Equalf(t, resp.StatusCode == http.StatusOK, want, "%s at the name %q: %s: allowed", path, host, resp.Status)
		}
	}
	for _, name := range []string{"", "a:80", "*.example.com", "http://a", "a b"} {
		if _, err := New(Options{Hosts: []string{name}}); err == nil {
			t.Errorf("the name %q is taken", name)
		}
	}
}

// The address that a browser has connected to is a name too, if the server listens on
// all addresses.
func TestOwnAddress(t *testing.T) {
	h := hosts{}
	for local, want := range map[string]bool{"192.0.2.7": true, "192.0.2.8": false} {
		r := httptest.NewRequest(http.MethodGet, "http://192.0.2.7:8080/", http.NoBody)
		at := &net.TCPAddr{IP: net.ParseIP(local), Port: 80}
		check.Equalf(t, h.allow(r.WithContext(context.WithValue(r.Context(), http.LocalAddrContextKey, at))), want, "at %s", local)
	}
}

// Nothing but reading passes, and nothing that another site asks for.
func TestReadsOnly(t *testing.T) {
	s := page(t, Options{API: http.HandlerFunc(echo)})
	for _, method := range []string{http.MethodPost, http.MethodPut, http.MethodDelete, http.MethodPatch, http.MethodOptions, http.MethodConnect, "GETX"} {
		for _, path := range []string{"/v1/close", "/v1/drain", "/v1/status", "/"} {
			if resp, body := ask(t, s, method, path, "Content-Type", "application/json"); resp.StatusCode != http.StatusMethodNotAllowed && method != http.MethodConnect || strings.Contains(body, "/v1") {
				t.Errorf("%s %s: %s %s", method, path, resp.Status, body)
			}
		}
	}
	for site, want := range map[string]int{"": 200, "none": 200, "same-origin": 200, "same-site": 403, "cross-site": 403, "nonsense": 403} {
		if resp, body := ask(t, s, http.MethodGet, "/v1/tap?opens=true", "Sec-Fetch-Site", site); resp.StatusCode != want || want == 200 && body != "GET /v1/tap?opens=true" {
			t.Errorf("Sec-Fetch-Site %q: %s %s", site, resp.Status, body)
		}
	}
}

// Each answer has the policy, and what it allows is nothing of others.
func TestPolicy(t *testing.T) {
	s := page(t, Options{API: http.HandlerFunc(echo)})
	for path, kind := range map[string]string{"/": "text/html; charset=utf-8", "/js/main.js": "text/javascript; charset=utf-8", "/css/base.css": "text/css; charset=utf-8", "/none": "application/json", "/v1/x": "", "/assets/index.html": "application/json", "/js/": "application/json", "/../web.go": "application/json"} {
		resp, _ := ask(t, s, http.MethodGet, path)
		h := resp.Header
		if kind != "" && h.Get("Content-Type") != kind {
			t.Errorf("%s is %s", path, h.Get("Content-Type"))
		}
		csp := h.Get("Content-Security-Policy")
		for _, want := range []string{"default-src 'none'", "script-src 'self'", "style-src 'self'", "frame-ancestors 'none'", "base-uri 'none'", "form-action 'none'", "require-trusted-types-for 'script'"} {
			check.Containsf(t, csp, want, "%s: the policy %q lacks %s", path, csp, want)
		}
		if strings.Contains(csp, "unsafe") || strings.Contains(csp, "http") || strings.Contains(csp, "*") {
			t.Errorf("%s: the policy is %q", path, csp)
		}
		if h.Get("X-Content-Type-Options") != "nosniff" || h.Get("X-Frame-Options") != "DENY" || h.Get("Referrer-Policy") != "no-referrer" || h.Get("Set-Cookie") != "" || h.Get("Access-Control-Allow-Origin") != "" {
			t.Errorf("%s: %v", path, h)
		}
	}
	resp, _ := ask(t, s, http.MethodGet, "/js/main.js")
	if again, _ := ask(t, s, http.MethodGet, "/js/main.js", "If-None-Match", resp.Header.Get("ETag")); again.StatusCode != http.StatusNotModified {
		t.Errorf("the same file again: %s", again.Status)
	}
}

// The files hold to the policy, and name only files that are there and this server.
func TestAssets(t *testing.T) {
	files := must.Get(newAssets())(t)
	inline := regexp.MustCompile(`(?i)<script>|<style|\sstyle=|\son[a-z]+\s*=\s*"|javascript:`)
	markup := regexp.MustCompile(`innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|\bDOMParser|createContextualFragment|srcdoc`)
	elsewhere := regexp.MustCompile(`(https?:)?//[a-z0-9.-]+\.[a-z]{2,}`)
	local := regexp.MustCompile(`(?:from|href=|src=|import) ?"(/[^"#]+)"`)
	for name, file := range files {
		text := string(file.data)
		if strings.HasSuffix(name, ".html") && inline.MatchString(text) {
			t.Errorf("%s has %q", name, inline.FindString(text))
		}
		if m := markup.FindString(text); m != "" && strings.HasSuffix(name, ".js") {
			t.Errorf("%s makes markup of text: %s", name, m)
		}
		check.Equalf(t, elsewhere.FindString(strings.ReplaceAll(text, "http://www.w3.org/2000/svg", "")), "", "%s names", name)
		for _, m := range local.FindAllStringSubmatch(text, -1) {
			if _, ok := files[m[1]]; !ok {
				t.Errorf("%s names %s, which is not there", name, m[1])
			}
		}
	}
}

// The page has words for ends that exist.
func TestEnds(t *testing.T) {
	files := must.Get(newAssets())(t)
	_, table, _ := strings.Cut(string(files["/js/format.js"].data), "const ends = {")
	table, _, _ = strings.Cut(table, "}")
	known := make(map[string]bool)
	for _, e := range conntrack.Ends() {
		known[e.String()] = true
	}
	words := regexp.MustCompile(`(?m)^  (\w+): "`).FindAllStringSubmatch(table, -1)
	if len(words) < 10 {
		t.Errorf("only %d ends are found", len(words))
	}
	for _, m := range words {
		if !known[m[1]] {
			t.Errorf("there is no end %s", m[1])
		}
	}
}

// Through an admin socket, with a stream whose lines come one by one.
func TestForward(t *testing.T) {
	name := filepath.Join(t.TempDir(), "admin.sock")
	next := make(chan string)
	mux := http.NewServeMux()
	mux.HandleFunc("/v1/tap", func(w http.ResponseWriter, r *http.Request) {
		for line := range next {
			_, _ = io.WriteString(w, line+"\n")
			_ = http.NewResponseController(w).Flush()
		}
	})
	mux.HandleFunc("/v1/echo", func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprint(w, r.Host, " ", r.URL, " ", len(r.Header["Cookie"])+len(r.Header["X-Forwarded-For"]), " ", r.Header.Get("Sluice-Read-Only"))
	})
	admin := must.Get(socket.Listen(name, mux))(t)
	s := must.Get(Listen("127.0.0.1:0", Options{API: Forward(client.Transport(name))}))(t)
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 2)
	go func() { ended <- admin.Serve(ctx) }()
	go func() { ended <- s.Serve(ctx) }()
	t.Cleanup(func() {
		stop()
		for range 2 {
			check.OK(t, <-ended)
		}
	})
	limited, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	get := func(path string) *http.Response {
		r := must.Get(http.NewRequestWithContext(limited, http.MethodGet, s.URL()+path, strings.NewReader("a body")))(t)
		r.Header.Set("Cookie", "a=b")
		resp := must.Get(http.DefaultClient.Do(r))(t)
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	if body, err := io.ReadAll(get("v1/echo?a=b%20c").Body); string(body) != "sluice /v1/echo?a=b%20c 0 true" || err != nil {
		t.Errorf("the socket was asked %q: %v", body, err)
	}
	if body, err := io.ReadAll(get("v1/echo?a=b;c").Body); string(body) != "sluice /v1/echo?a=b;c 0 true" || err != nil {
		t.Errorf("the socket was asked %q: %v", body, err)
	}
	// The next line is sent when the one before has come.
	go func() { next <- "0" }()
	lines := bufio.NewScanner(get("v1/tap").Body)
	for i := range 3 {
		if !lines.Scan() || lines.Text() != fmt.Sprint(i) {
			t.Fatalf("line %d is %q: %v", i, lines.Text(), lines.Err())
		}
		next <- fmt.Sprint(i + 1)
	}
	close(next)
	admin.Close()
	if resp := get("v1/echo"); resp.StatusCode != http.StatusBadGateway {
		t.Errorf("without the proxy: %s", resp.Status)
	}
}

// Text is legible in both schemes: its colours have a contrast of 4.5 to each ground, as
// WCAG 2.1 asks of small text (AA).
func TestContrast(t *testing.T) {
	files := must.Get(newAssets())(t)
	luminance := func(hex string) float64 {
		var rgb [3]float64
		for i := range rgb {
			n := must.Get(strconv.ParseUint(hex[2*i:2*i+2], 16, 8))(t)
			if rgb[i] = float64(n) / 255; rgb[i] <= 0.03928 {
				rgb[i] /= 12.92
			} else {
				rgb[i] = math.Pow((rgb[i]+0.055)/1.055, 2.4)
			}
		}
		return 0.2126*rgb[0] + 0.7152*rgb[1] + 0.0722*rgb[2]
	}
	schemes := 0
	for _, block := range strings.Split(string(files["/css/base.css"].data), "}") {
		colours := make(map[string]string)
		for _, m := range regexp.MustCompile(`--([a-z-]+): #([0-9a-f]{6});`).FindAllStringSubmatch(block, -1) {
			colours[m[1]] = m[2]
		}
		if colours["ink"] == "" {
			continue
		}
		schemes++
		for _, text := range []string{"ink", "soft", "faint", "flow", "fail", "warn", "good"} {
			for _, ground := range []string{"paper", "card", "sunk"} {
				a, b := luminance(colours[text]), luminance(colours[ground])
				if ratio := (max(a, b) + 0.05) / (min(a, b) + 0.05); ratio < 4.5 {
					t.Errorf("%s on %s: %.2f", text, ground, ratio)
				}
			}
		}
	}
	check.Equalf(t, schemes, 3, "schemes")
}
