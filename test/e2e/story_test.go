package e2e

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// told is a case of TestStoryNamesWhoIsWaitedFor.
type told struct {
	name   string
	path   string               // the data path
	serve  func(net.Conn) error // the pod
	client func(net.Conn) error
	cut    func(*netns.Lab) error // what happens next
	who    string
	why    string
}

// deaf keeps the connection and reads nothing.
func deaf(net.Conn) error { return nil }

// unanswering reads and never answers.
func unanswering(c net.Conn) error { _, err := io.Copy(io.Discard, c); return err }

// asks sends a request.
func asks(c net.Conn) error { _, err := io.WriteString(c, "GET /\n"); return err }

// answers reads a request and sends an answer.
func answers(c net.Conn) error {
	if _, err := io.ReadFull(c, make([]byte, 6)); err != nil {
		return err
	}
	return asks(c)
}

// floods sends more than all buffers on the way take.
func floods(c net.Conn) error {
	for range 64 {
		if _, err := c.Write(make([]byte, 1<<20)); err != nil {
			return err
		}
	}
	return nil
}

var stories = []told{
	{"a pod that does not answer", "relay", unanswering, asks, nil, "pod", "has not answered for "},
	{"a pod that does not read", "relay", deaf, floods, nil, "pod", "does not read"},
	{"a client that says nothing", "relay", unanswering, deaf, nil, "client", "has sent nothing yet"},
	{"a client that got its answer", "relay", answers, asks, nil, "client", "has sent nothing for "},
	{"a client that does not read", "relay", floods, deaf, nil, "client", "does not read"},
	{"a pod that cannot be reached", "relay", unanswering, asks, cutPod, "pod_network", "were not acknowledged"},
	{"a pod that does not answer", "kernel", unanswering, asks, nil, "pod", "has not answered for "},
	{"a pod that cannot be reached", "kernel", unanswering, asks, cutPod, "pod_network", "were not acknowledged"},
}

// cutPod drops what comes from the pod.
func cutPod(lab *netns.Lab) error { return lab.Backends[0].SetDown("eth0") }

// TestStoryNamesWhoIsWaitedFor: sluice story says which side an open connection waits for,
// and why.
func TestStoryNamesWhoIsWaitedFor(t *testing.T) {
	t.Parallel()
	for _, s := range stories {
		t.Run(s.path+": "+s.name, func(t *testing.T) {
			t.Parallel()
			lab := netns.NewLab(t, 1)
			serveBy(t, lab.Backends[0], s.serve)
			a := &algorithms{t: t, lab: lab, vips: map[string]string{}}
			p := newProxy(t, lab.Node)
			a.write(p, "told", "", "")
			p.start("--datapath", s.path)
			c := lab.Client.Connect(t, "tcp", a.vips["told"]+":80")
			awaitListed(t, lab, "state=open")
			if s.cut != nil {
				must.OK(t, s.cut(lab))
			}
			go func() { _ = s.client(c) }()
			var last api.Connection
			wait.For(t, "the verdict", startTimeout, func() error {
				id := strconv.FormatUint(awaitListed(t, lab, "").ID, 10)
				out, err := sluice(t, lab, "story", id, "-o", "json")
				last = api.Connection{}
				if err := json.Unmarshal([]byte(out), &last); err != nil {
					return fmt.Errorf("%w: %s", err, out)
				}
				if v := last.Verdict; err != nil || v == nil || v.Who != s.who || !strings.Contains(v.Why, s.why) {
					return fmt.Errorf("%v, want %s: %s; got %s", err, s.who, s.why, out)
				}
				return nil
			})
			t.Logf("%+v", *last.Verdict)
			out, err := sluice(t, lab, "story", strconv.FormatUint(last.ID, 10))
			if err != nil || !strings.Contains(out, s.why) {
				t.Errorf("%v, want %q: %s", err, s.why, out)
			}
		})
	}
}

// serveBy accepts on port 8080 and calls f for each connection, which stays open.
func serveBy(t *testing.T, h *netns.Host, f func(net.Conn) error) {
	l := must.Get(h.Listen("tcp", ":8080"))(t)
	t.Cleanup(func() { _ = l.Close() })
	go netns.Accept(l, func(c net.Conn) {
		t.Cleanup(func() { _ = c.Close() })
		go func() { _ = f(c) }()
	})
}

// awaitListed waits until sluice conns lists one connection that matches a filter.
func awaitListed(t *testing.T, lab *netns.Lab, filter string) (c api.Connection) {
	t.Helper()
	wait.For(t, "one open connection", startTimeout, func() error {
		args := []string{"conns", "-o", "json"}
		if filter != "" {
			args = append(args, filter)
		}
		out, err := sluice(t, lab, args...)
		if err != nil || strings.Count(out, "\n") != 1 {
			return fmt.Errorf("%v: %s", err, out)
		}
		return json.Unmarshal([]byte(out), &c)
	})
	return c
}

// TestStoryOfAnotherConfiguration: sluice story says that its Service has changed since a
// connection opened, and sluice explain since when it is as it is. Other Services do not count.
func TestStoryOfAnotherConfiguration(t *testing.T) {
	t.Parallel()
	lab := netns.NewLab(t, 2)
	lab.EchoTCP(t, 8080)
	p := startProxy(t, lab, []webService{webOn(lab)})
	hold(t, lab.Client, addresses(80, vip4)[0], 1)
	id := strconv.FormatUint(awaitListed(t, lab, "state=open").ID, 10)
	const changed = "the Service, its endpoints or this node have changed since it began, at "
	if out, err := sluice(t, lab, "story", id); err != nil || strings.Contains(out, changed) {
		t.Fatalf("%v: %s", err, out)
	}
	other := webService{name: "other", vips: []string{"10.96.0.82"}, port: 80, endpoints: on(8080, lab.Backends...)}
	p.apply(other)
	wait.For(t, "another Service is there", startTimeout, func() error {
		_, err := lab.Client.Dial("tcp", other.vips[0]+":80")
		return err
	})
	if out, err := sluice(t, lab, "story", id); err != nil || strings.Contains(out, changed) {
		t.Fatalf("another Service is no change: %v: %s", err, out)
	}
	web := webOn(lab)
	web.endpoints = append(web.endpoints, on(8081, lab.Backends[0])...)
	p.apply(web)
	var at string
	wait.For(t, "the story says that it has changed", startTimeout, func() error {
		out, err := sluice(t, lab, "story", id)
		_, after, found := strings.Cut(out, changed)
		if at, _, _ = strings.Cut(after, ": "); err != nil || !found {
			return fmt.Errorf("%v: %s", err, out)
		}
		return nil
	})
	says(t, lab, "since      "+at, "explain", "--from", "10.1.0.2", "--to", addresses(80, vip4)[0])
}
