package kubernetes

import (
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/rs/zerolog"
	eventsv1 "k8s.io/api/events/v1"
	"k8s.io/apimachinery/pkg/runtime/serializer"

	"github.com/sluice-proxy/sluice/service"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/wait"
)

// Events arrive as the API has them, the same one once, and of a flood of them the
// burst, with what the rate allows in the time that the test takes.
func TestEvents(t *testing.T) {
	scheme := must.Get(newScheme())(t)
	decoder := serializer.NewCodecFactory(scheme).UniversalDeserializer()
	var mu sync.Mutex
	got := map[string][]*eventsv1.Event{} // by path
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		check.OK(t, err)
		event := &eventsv1.Event{}
		if _, _, err := decoder.Decode(body, nil, event); err != nil {
			t.Error(err)
		}
		mu.Lock()
		defer mu.Unlock()
		got[r.Method+" "+r.URL.Path] = append(got[r.Method+" "+r.URL.Path], event)
		w.Header().Set("Content-Type", r.Header.Get("Content-Type"))
		w.WriteHeader(http.StatusCreated)
		_, _ = w.Write(body)
	}))
	defer server.Close()
	client := must.Get(Connect(Connection{Master: server.URL, QPS: 1000, Burst: 1000}))(t)
	events := NewEvents(client, "node-1", zerolog.Nop())
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	began := time.Now()
	go func() {
		defer close(done)
		events.Run(ctx)
	}()
	web := service.Name{Namespace: "shop", Name: "web"}
	events.Send(Event{Reason: "Starting", Action: "StartKubeProxy", Note: "hello"})
	for range 3 {
		events.Send(Event{Service: web, Warning: true, Reason: "Bad", Action: "Listen", Note: strings.Repeat("x", 3000)})
	}
	count := func(path string) int {
		mu.Lock()
		defer mu.Unlock()
		return len(got["POST /apis/events.k8s.io/v1/namespaces/"+path+"/events"])
	}
	wait.True(t, "both events", func() bool { return count("default") == 1 && count("shop") == 1 })
	for i := range eventQueue {
		events.Send(Event{Reason: "Flood", Action: "Test", Note: strings.Repeat("y", i+1)})
	}
	wait.True(t, "the burst", func() bool { return count("default")+count("shop") >= eventBurst && len(events.queue) == 0 })
	cancel()
	<-done
	most := eventBurst + int(eventRate*time.Since(began).Seconds())
	if n := count("default") + count("shop"); n > most {
		t.Errorf("%d events were sent, want at most %d", n, most)
	}
	mu.Lock()
	defer mu.Unlock()
	about := got["POST /apis/events.k8s.io/v1/namespaces/shop/events"][0]
	if about.Regarding.Kind != "Service" || about.Regarding.Name != "web" || about.Type != "Warning" || len(about.Note) != longestNote ||
		about.ReportingController == "" || about.ReportingInstance == "" || about.EventTime.IsZero() {
		t.Errorf("the Service's event is %+v", about)
	}
	if first := got["POST /apis/events.k8s.io/v1/namespaces/default/events"][0]; first.Regarding.Kind != "Node" || first.Regarding.Name != "node-1" || first.Type != "Normal" {
		t.Errorf("the node's event is %+v", first)
	}
	var none *Events
	none.Send(Event{})
	none.Run(ctx)
}

// TestEventNotesArePrintable has a note with what a terminal would obey.
func TestEventNotesArePrintable(t *testing.T) {
	e := NewEvents(nil, "node", zerolog.Nop())
	note := e.object(Event{Note: "zone a\x1b[2J\u202e\u009b\n"}, time.Now()).Note
	check.Equalf(t, note, `zone a\x1b[2J\u202e\u009b\n`, "note")
}
