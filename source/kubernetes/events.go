package kubernetes

import (
	"context"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/rs/zerolog"
	corev1 "k8s.io/api/core/v1"
	eventsv1 "k8s.io/api/events/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/util/flowcontrol"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/service"
)

const (
	// eventQueue is how many events may wait to be sent; further ones are lost.
	eventQueue = 64
	// eventBurst is how many may be sent at once, eventRate how many a second
	// after that: one in ten seconds.
	eventBurst = 25
	eventRate  = 0.1
	// needBurst is eventBurst for NeedEndpoints in a namespace, and maxAsking bounds the
	// namespaces that are remembered.
	needBurst = 5
	maxAsking = 1000
	// eventRepeat is the least time between two equal events.
	eventRepeat = 10 * time.Minute
	// eventTimeout bounds one attempt to send.
	eventTimeout = 10 * time.Second
	// longestNote is what the API allows for an event's text, in bytes.
	longestNote = 1024

	controller = "sluice"
)

// Event is something that an operator of the cluster should know.
type Event struct {
	// Service is what it is about; this node if it is empty.
	Service service.Name
	// Warning is set when something is wrong.
	Warning bool
	// Reason and Action are words for programs: "Starting", "StartKubeProxy".
	Reason, Action string
	// Note is for people.
	Note string
}

// Events sends events to the API server at a limited rate: an equal one at most
// every ten minutes, 25 at first, then one in ten seconds. Further ones, and those
// that cannot be sent, are lost; the log has them all.
//
// Its methods may be called on nil, which sends nothing.
type Events struct {
	client *Client
	node   string
	log    zerolog.Logger
	queue  chan Event
}

// NeedEndpoints is the reason of events that an autoscaler acts on. They have a rate of
// their own for each namespace.
const NeedEndpoints = "NeedEndpoints"

// NewEvents returns Events about a node and the Services on it.
func NewEvents(client *Client, node string, log zerolog.Logger) *Events {
	return &Events{client: client, node: node, log: log, queue: make(chan Event, eventQueue)}
}

// Send queues an event. It never waits. Safe for concurrent use.
func (e *Events) Send(event Event) {
	if e == nil {
		return
	}
	select {
	case e.queue <- event:
	default:
		e.log.Debug().Str("reason", event.Reason).Msg("too many events wait to be sent: one is lost")
	}
}

// Run sends what is queued until ctx ends.
func (e *Events) Run(ctx context.Context) {
	if e == nil {
		return
	}
	limit := flowcontrol.NewTokenBucketRateLimiter(eventRate, eventBurst)
	asking := make(map[string]flowcontrol.RateLimiter) // by namespace, of NeedEndpoints
	sent := make(map[Event]time.Time)
	for {
		select {
		case <-ctx.Done():
			return
		case event := <-e.queue:
			now := time.Now()
			for old, at := range sent {
				if now.Sub(at) >= eventRepeat {
					delete(sent, old)
				}
			}
			of := limit
			if event.Reason == NeedEndpoints { // a namespace with many such Services keeps no others from asking
				if len(asking) >= maxAsking {
					clear(asking)
				}
				if of = asking[event.Service.Namespace]; of == nil {
					of = flowcontrol.NewTokenBucketRateLimiter(eventRate, needBurst)
					asking[event.Service.Namespace] = of
				}
			}
			if _, again := sent[event]; again || !of.TryAccept() {
				continue
			}
			sent[event] = now
			if err := e.send(ctx, event, now); err != nil {
				e.log.Debug().Err(err).Str("reason", event.Reason).Msg("an event could not be sent")
			}
		}
	}
}

func (e *Events) send(ctx context.Context, event Event, now time.Time) error {
	ctx, cancel := context.WithTimeout(ctx, eventTimeout)
	defer cancel()
	object := e.object(event, now)
	return e.client.events.Post().Namespace(object.Namespace).Resource("events").Body(object).Do(ctx).Error()
}

// object returns the event as the API has it. Events about nodes live in the
// namespace default.
func (e *Events) object(event Event, now time.Time) *eventsv1.Event {
	regarding := corev1.ObjectReference{APIVersion: "v1", Kind: "Node", Name: e.node}
	namespace := metav1.NamespaceDefault
	if event.Service != (service.Name{}) {
		namespace = event.Service.Namespace
		regarding = corev1.ObjectReference{APIVersion: "v1", Kind: "Service", Namespace: namespace, Name: event.Service.Name}
	}
	kind := corev1.EventTypeNormal
	if event.Warning {
		kind = corev1.EventTypeWarning
	}
	note := printable.Text(event.Note)
	if len(note) > longestNote {
		note = strings.ToValidUTF8(note[:longestNote-3], "") + "..."
	}
	instance := controller + "-" + e.node
	if name, err := os.Hostname(); err == nil {
		instance = controller + "-" + name
	}
	return &eventsv1.Event{
		ObjectMeta:          metav1.ObjectMeta{Namespace: namespace, Name: fmt.Sprintf("%.200s.%x", regarding.Name, now.UnixNano())},
		EventTime:           metav1.NewMicroTime(now),
		ReportingController: controller, ReportingInstance: instance[:min(len(instance), 128)],
		Action: event.Action, Reason: event.Reason, Type: kind, Note: note, Regarding: regarding,
	}
}
