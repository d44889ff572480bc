package sctp

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/stream"
	"github.com/sluice-proxy/sluice/test/check"
	"github.com/sluice-proxy/sluice/test/must"
	"github.com/sluice-proxy/sluice/test/netns"
	"github.com/sluice-proxy/sluice/test/wait"
)

// A message as large as --max-sctp-message passes whole, one beyond it ends its
// association with its own end in the record, and neighbours live on.
func TestProxyBoundsMessages(t *testing.T) {
	const bound = 900 << 10
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}), "--max-sctp-message", fmt.Sprint(bound))
	open := func() *peer {
		return must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", options()))(t)
	}
	neighbours := []*peer{open(), open(), open()}
	for _, n := range neighbours {
		talk(t, n, "before")
	}
	a := open()
	want := note{sys.MessageInfo{Stream: 5, PPID: 7}, bytes.Repeat([]byte("0123456789abcdef"), bound/16)}
	for range 3 {
		must.OK(t, a.send(want))
		for _, n := range neighbours {
			talk(t, n, "beside")
		}
		if got, err := a.receive(); err != nil || got.MessageInfo != want.MessageInfo || !bytes.Equal(got.text, want.text) {
			t.Fatalf("%d bytes came back as %d, %+v, %v", bound, len(got.text), got.MessageInfo, err)
		}
	}
	_ = a.send(note{text: make([]byte, bound+1)})
	check.ErrorIsf(t, must.Err(a.receive()), sys.ECONNRESET, "beyond the bound")
	if r := p.ended(1)[0]; r.End != "message_too_large" || r.FromClient != 3 || r.BytesUp != 3*bound || r.BytesDown != 3*bound {
		t.Errorf("%+v", r)
	}
	for _, n := range neighbours {
		talk(t, n, "after")
		n.abort()
	}
	p.ended(len(neighbours))
}

// The annotation bounds the streams of a Service's new associations, and follows changes.
// Messages pass on the last stream.
func TestProxyFollowsTheStreamsAnnotation(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	accepted := make(chan sys.SCTPStatus, 100)
	most := options()
	most.OutStreams, most.InStreams = stream.MostStreams, stream.MostStreams
	serve(t, b.Namespace, at(b), most, func(p *peer) {
		s, _ := sys.SCTPStatusOf(p.fd)
		accepted <- s
		echo(p)
	})
	with := func(n string) string {
		return manifest(svc{name: "web", ip: "10.96.0.10", meta: `{sluice.dev/sctp-streams: "` + n + `"}`, endpoints: []string{b.IPv4.String()}})
	}
	p := startProxy(t, lab.Node.Namespace, with("5"))
	for _, want := range []uint16{5, 9, 1, 40, stream.MostStreams} {
		p.write(with(fmt.Sprint(want)))
		wait.For(t, fmt.Sprint(want, " streams"), patience, func() error {
			a, err := dial(lab.Client.Namespace, "10.96.0.10:3868", most)
			if err != nil {
				return err
			}
			defer a.abort()
			talk(t, a, "hello")
			mine, _ := sys.SCTPStatusOf(a.fd)
			theirs := <-accepted
			if mine.Out != want || mine.In != want || theirs.Out != want || theirs.In != want {
				return fmt.Errorf("the client has %d, %d streams, the endpoint %d, %d", mine.Out, mine.In, theirs.Out, theirs.In)
			}
			if e := a.box.Send(a.fd, []byte("x"), sys.MessageInfo{Stream: want}); e != sys.EINVAL {
				return fmt.Errorf("a stream beyond: %w", e)
			}
			last := note{sys.MessageInfo{Stream: want - 1}, []byte("x")}
			if err := a.send(last); err != nil {
				return err
			}
			if got, err := a.receive(); err != nil || got.Stream != want-1 {
				t.Errorf("on the last stream: %+v, %v", got, err)
			}
			return nil
		})
	}
}

// Source ranges that change while clients connect hold for new associations; open ones go
// on.
func TestProxyFollowsSourceRanges(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	with := func(ranges string) string {
		return manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{b.IPv4.String()}}) + `---
apiVersion: v1
kind: Service
metadata: {name: balanced, namespace: default}
spec:
  type: LoadBalancer
  clusterIP: "10.96.0.17"
  loadBalancerSourceRanges: ["` + ranges + `"]
  ports: [{name: s, port: 3868, targetPort: 13868, protocol: SCTP}]
status: {loadBalancer: {ingress: [{ip: "198.51.100.30"}]}}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: balanced, namespace: default, labels: {kubernetes.io/service-name: balanced}}
addressType: IPv4
ports: [{name: s, port: 13868, protocol: SCTP}]
endpoints: [{addresses: ["` + b.IPv4.String() + `"], conditions: {ready: true}}]
`
	}
	allowed, other := lab.Client.IPv4.String()+"/32", "192.0.2.0/24"
	p := startProxy(t, lab.Node.Namespace, with(allowed))
	kept := must.Get(dial(lab.Client.Namespace, "198.51.100.30:3868", options()))(t)
	defer kept.abort()
	try := func() error {
		a, err := dialIn(lab.Client.Namespace, "198.51.100.30:3868", netip.Addr{}, 700*time.Millisecond)
		if err != nil {
			return err
		}
		defer a.abort()
		// The ranges may change between its INIT and its turn: then it gets an ABORT.
		if err := a.send(note{text: []byte("hello")}); err != nil {
			return err
		}
		_, err = a.receive()
		return err
	}
	for round := range 2 {
		must.OKf(t, wait.Poll(patience, try), "round %d: an allowed client", round)
		p.write(with(other))
		wait.For(t, "silence", patience, func() error {
			if err := try(); !errors.Is(err, sys.ETIMEDOUT) {
				return fmt.Errorf("another client: %w", err)
			}
			return nil
		})
		talk(t, kept, "goes on")
		p.write(with(allowed))
	}
}

// Associations that wait for their endpoints get an ABORT, too, when the proxy stops.
func TestProxyStopsWaitingAssociations(t *testing.T) {
	lab := netns.NewLab(t, 1)
	p := startProxy(t, lab.Node.Namespace, manifest(svc{name: "web", ip: "10.96.0.10", endpoints: []string{lab.Backends[0].IPv4.String()}}))
	const associations = 100
	var open []*peer
	for range associations {
		a := must.Get(dial(lab.Client.Namespace, "10.96.0.10:3868", sys.SCTPOptions{OutStreams: 10, InStreams: 10}))(t)
		a.buffer = make([]byte, 100)
		open = append(open, a)
	}
	p.stop()
	var all sync.WaitGroup
	for _, a := range open {
		all.Go(func() {
			if _, err := a.receive(); !errors.Is(err, sys.ECONNRESET) && !errors.Is(err, io.EOF) {
				t.Errorf("a client saw %v", err)
			}
			a.abort()
		})
	}
	all.Wait()
	ends := make(map[string]int)
	for _, r := range p.ended(associations) {
		ends[r.End]++
	}
	if ends["shutdown"] == 0 || ends["shutdown"]+ends["connect_failed"] != associations {
		t.Errorf("%v", ends)
	}
}

// Mode bind serves SCTP, too.
func TestProxyModeBind(t *testing.T) {
	lab := netns.NewLab(t, 1)
	b := lab.Backends[0]
	serve(t, b.Namespace, at(b), options(), echo)
	p := startProxy(t, lab.Node.Namespace, manifest(
		svc{name: "web", ip: "10.96.0.10", spec: "type: NodePort\n# nodePort 30001\n", endpoints: []string{b.IPv4.String()}},
		svc{name: "empty", ip: "10.96.0.11"}), "--redirect", "bind")
	check.Containsf(t, p.said(), `"bind"`, "the log names another mode")
	for _, to := range []string{"10.96.0.10:3868", lab.Node.IPv4.String() + ":30001"} {
		a, err := dial(lab.Client.Namespace, to, options())
		if err != nil {
			t.Errorf("%s: %v", to, err)
			continue
		}
		talk(t, a, "hello")
		a.abort()
	}
	check.ErrorIsf(t, must.Err(dial(lab.Client.Namespace, "10.96.0.11:3868", options())), sys.ECONNREFUSED, "without endpoints")
}
