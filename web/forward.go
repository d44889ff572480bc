package web

import (
	"context"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httputil"

	"github.com/sluice-proxy/sluice/live/api"
)

// Forward returns a handler that passes the reading of a browser on to an admin
// socket, to which transport connects. It carries no header of the browser but what
// it accepts, and no body, and says that it only reads.
func Forward(transport http.RoundTripper) http.Handler {
	return &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.Out.URL.RawQuery = r.In.URL.RawQuery // also what is wrong, for the error
			r.Out.URL.Scheme, r.Out.URL.Host, r.Out.Host = "http", "sluice", "sluice"
			r.Out.Header = http.Header{"Accept": r.In.Header.Values("Accept"), api.ReadOnly: {"true"}}
			r.Out.Body, r.Out.ContentLength = nil, 0
		},
		Transport:     transport,
		FlushInterval: -1, // streams
		ErrorLog:      log.New(io.Discard, "", 0),
		ErrorHandler: func(w http.ResponseWriter, _ *http.Request, err error) {
			if errors.Is(err, context.Canceled) {
				return // the browser has gone
			}
			refuse(w, http.StatusBadGateway, "the proxy does not answer: "+err.Error())
		},
	}
}
