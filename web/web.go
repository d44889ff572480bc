// Package web serves the page that shows what happens now, and the admin API beside
// it, to browsers. It only reads: the page has no actions, and requests other than GET
// are refused.
//
// A browser carries requests of other sites. So the page answers only to the names of
// this machine ([Options]), which stops DNS rebinding; refuses what another site's page
// asks for; uses no cookies; and its policy allows only its own scripts and styles.
// The names of a cluster are text for the page, never markup: the browser enforces that
// too (require-trusted-types-for).
package web

import (
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
	"time"
)

// Options are what the page is made of.
type Options struct {
	// API answers the requests below /v1/.
	API http.Handler
	// Hosts are names by which browsers may ask, beside loopback's and the address
	// that a connection was accepted at.
	Hosts []string
}

// policy is the page's Content-Security-Policy.
const policy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; " +
	"base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"

// New returns the handler of the page.
func New(o Options) (http.Handler, error) {
	hosts, err := newHosts(o.Hosts)
	if err != nil {
		return nil, err
	}
	files, err := newAssets()
	if err != nil {
		return nil, err
	}
	mux := http.NewServeMux()
	mux.Handle("/", files)
	mux.Handle("/v1/", ownPage(lasting(o.API)))
	return guarded(hosts, mux), nil
}

// guarded sets the headers of all answers, and passes on only what may be asked.
func guarded(hosts hosts, next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("X-Frame-Options", "DENY")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		switch {
		case !hosts.allow(r):
			refuse(w, http.StatusMisdirectedRequest, fmt.Sprintf("this page does not answer to the name %q: use localhost, or allow the name (--allowed-hosts of sluice web, --web-allowed-hosts of sluice run)", r.Host))
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			h.Set("Allow", "GET, HEAD")
			refuse(w, http.StatusMethodNotAllowed, "this page only reads: actions go through the admin socket")
		default:
			next.ServeHTTP(w, r)
		}
	})
}

// ownPage refuses requests that the page of another site makes. It could not read the
// answers, but open streams. Programs other than browsers do not send the header.
func ownPage(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.Header.Get("Sec-Fetch-Site") {
		case "", "same-origin", "none":
			next.ServeHTTP(w, r)
		default:
			refuse(w, http.StatusForbidden, "this is for the page of this server alone")
		}
	})
}

// refuse answers with an error as the admin API does.
func refuse(w http.ResponseWriter, status int, text string) {
	body, err := json.Marshal(map[string]string{"error": text})
	if err != nil {
		body = nil
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(body, '\n')) // the client may have gone
}

// readerPatience is how long a stream waits for a browser that has stopped reading.
const readerPatience = time.Minute

// lasting lets answers of the API last: a stream has no end, so each write has its own
// deadline.
func lasting(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		control := http.NewResponseController(w)
		_ = control.SetReadDeadline(time.Time{}) // the request has arrived; tests' writers have none
		next.ServeHTTP(&patient{w, control}, r)
	})
}

// patient gives each write a deadline.
type patient struct {
	http.ResponseWriter
	control *http.ResponseController
}

// Write implements http.ResponseWriter.
func (p *patient) Write(b []byte) (int, error) {
	_ = p.control.SetWriteDeadline(time.Now().Add(readerPatience)) // tests' writers have none
	return p.ResponseWriter.Write(b)
}

// Unwrap is for http.ResponseController.
func (p *patient) Unwrap() http.ResponseWriter { return p.ResponseWriter }

// isLoopbackName reports whether a name is that of loopback by RFC 6761.
func isLoopbackName(name string) bool {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	return name == "localhost" || strings.HasSuffix(name, ".localhost")
}
