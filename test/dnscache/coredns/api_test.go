package coredns

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"testing"
)

// resources are the kinds that CoreDNS watches.
var resources = []struct{ version, kind, path string }{
	{"v1", "Namespace", "/api/v1/namespaces"},
	{"v1", "Service", "/api/v1/services"},
	{"discovery.k8s.io/v1", "EndpointSlice", "/apis/discovery.k8s.io/v1/endpointslices"},
}

// serveAPI serves watches of objects, in JSON by kind, that never change, and returns the URL.
func serveAPI(t *testing.T, objects map[string][]string) string {
	t.Helper()
	mux := http.NewServeMux()
	for _, of := range resources {
		mux.HandleFunc("GET "+of.path, func(w http.ResponseWriter, r *http.Request) {
			if r.FormValue("sendInitialEvents") != "true" {
				http.Error(w, "only watches with initial events are served", http.StatusNotImplemented)
				return
			}
			w.Header().Set("Content-Type", "application/json")
			for _, o := range objects[of.kind] {
				fmt.Fprintf(w, "{\"type\": \"ADDED\", \"object\": %s}\n", o)
			}
			fmt.Fprintf(w, `{"type": "BOOKMARK", "object": {"apiVersion": %q, "kind": %q, "metadata": {"resourceVersion": "1",`+
				` "annotations": {"k8s.io/initial-events-end": "true"}}}}`+"\n", of.version, of.kind)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		})
	}
	s := httptest.NewServer(mux)
	t.Cleanup(func() { s.CloseClientConnections(); s.Close() })
	return s.URL
}
