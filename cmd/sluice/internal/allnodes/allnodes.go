// Package allnodes answers what a page asks of the admin API for the proxies of several nodes:
// of the node that the request names, or of all together. Nodes that do not answer are
// named in the status. It only reads.
package allnodes

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/sluice-proxy/sluice/internal/printable"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/web"
)

// Param is the parameter of a request that names the node to ask; all without it.
const Param = "proxy_node"

// Node is where a node's proxy is asked.
type Node struct {
	Name string
	// ID tells the node's proxy from the one that takes its place: that of its pod.
	ID        string
	Transport http.RoundTripper // nil with Trouble
	Trouble   error             // why the proxy cannot be asked
}

// API asks the nodes. It is safe for concurrent use.
type API struct {
	timeout time.Duration // of an answer that is no stream

	mu    sync.Mutex
	nodes []*node // guarded by mu; sorted by name
}

// node is a Node and whether it answers.
type node struct {
	Node
	client  *http.Client
	trouble error // guarded by API.mu: why it is not asked now
}

// New returns an API without nodes.
func New(timeout time.Duration) *API { return &API{timeout: timeout} }

// Set says which nodes there are, sorted by name. Then it asks those that did not answer
// whether they do now: until the next Set, no other request waits for them.
func (f *API) Set(ctx context.Context, all []Node) {
	f.mu.Lock()
	before := f.nodes
	f.nodes = nil
	for _, n := range all {
		at := slices.IndexFunc(before, func(b *node) bool { return b.Name == n.Name && b.ID == n.ID && b.Trouble == nil && n.Trouble == nil })
		if at >= 0 {
			f.nodes = append(f.nodes, before[at])
			continue
		}
		f.nodes = append(f.nodes, &node{Node: n, client: &http.Client{Transport: n.Transport}, trouble: cmp.Or(n.Trouble, errNotYet)})
	}
	silent := slices.DeleteFunc(slices.Clone(f.nodes), func(n *node) bool { return n.trouble == nil || n.Trouble != nil })
	f.mu.Unlock()
	var asked sync.WaitGroup
	for _, n := range silent {
		asked.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, f.timeout)
			defer cancel()
			_, err := n.get(ctx, api.PathVersion, nil)
			f.note(n, err)
		})
	}
	asked.Wait()
}

var errNotYet = errors.New("it has not answered yet")

// note keeps why a node has not answered, or that it has.
func (f *API) note(n *node, err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	n.trouble = err
}

// answering returns the nodes that answer.
func (f *API) answering() []*node {
	f.mu.Lock()
	defer f.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(f.nodes), func(n *node) bool { return n.trouble != nil })
}

// Nodes returns all nodes, and why some do not answer.
func (f *API) Nodes() []api.ProxyNode {
	f.mu.Lock()
	defer f.mu.Unlock()
	list := make([]api.ProxyNode, 0, len(f.nodes))
	for _, n := range f.nodes {
		p := api.ProxyNode{Node: n.Name}
		if n.trouble != nil {
			p.Trouble = strings.Join(strings.Fields(n.trouble.Error()), " ")
		}
		list = append(list, p)
	}
	return list
}

// ServeHTTP implements http.Handler.
func (f *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	name := query.Get(Param)
	query.Del(Param)
	switch answer := merged[r.URL.Path]; {
	case name != "":
		f.ofOne(w, r, name, query)
	case answer == nil:
		refuse(w, http.StatusBadRequest, "choose a node: this is asked of one")
	case r.Method == http.MethodHead: // a stream would have no end
		w.WriteHeader(http.StatusOK)
	default:
		if err := answer(f, w, r, query); err != nil {
			fail(w, err)
		}
	}
}

// ofOne answers for one node.
func (f *API) ofOne(w http.ResponseWriter, r *http.Request, name string, query url.Values) {
	all := f.answering()
	at := slices.IndexFunc(all, func(n *node) bool { return n.Name == name })
	if at < 0 {
		why := "there is no such node"
		for _, n := range f.Nodes() {
			if n.Node == name {
				why = n.Trouble
			}
		}
		refuse(w, http.StatusBadGateway, name+" does not answer: "+why)
		return
	}
	if r.URL.Path == api.PathStatus {
		status, err := ask[api.Status](f, r, query, all[at:at+1])
		if err != nil {
			fail(w, err)
			return
		}
		status[0].answer.Nodes = f.Nodes()
		send(w, &status[0].answer)
		return
	}
	r = r.Clone(r.Context())
	r.URL.RawQuery = query.Encode()
	web.Forward(all[at].Transport).ServeHTTP(w, r)
}

// refusal is an answer by which a proxy refuses a request, such as one with a wrong filter:
// all proxies would.
type refusal struct {
	status int
	body   []byte
}

func (r *refusal) Error() string { return fmt.Sprintf("status %d", r.status) }

// maxAnswer bounds the answer of a node, and maxLine a line of a stream.
const (
	maxAnswer = 64 << 20
	maxLine   = 16 << 20
)

// open sends a request. The answer has status 200.
func (n *node) open(ctx context.Context, path string, query url.Values) (io.ReadCloser, error) {
	target := url.URL{Scheme: "http", Host: "sluice", Path: path, RawQuery: query.Encode()}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, target.String(), http.NoBody)
	if err != nil {
		return nil, err
	}
	req.Header.Set(api.ReadOnly, "true")
	resp, err := n.client.Do(req)
	if wrapped := (*url.Error)(nil); errors.As(err, &wrapped) {
		err = wrapped.Err // without the URL, which says nothing
	}
	if err != nil || resp.StatusCode == http.StatusOK {
		return bodyOf(resp), err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return nil, err
	}
	return nil, &refusal{resp.StatusCode, body}
}

func bodyOf(r *http.Response) io.ReadCloser {
	if r == nil {
		return nil
	}
	return r.Body
}

// get returns an answer that is no stream.
func (n *node) get(ctx context.Context, path string, query url.Values) ([]byte, error) {
	body, err := n.open(ctx, path, query)
	if err != nil {
		return nil, err
	}
	defer body.Close()
	return io.ReadAll(io.LimitReader(body, maxAnswer))
}

var errNobody = errors.New("no node answers")

// of is what a node has answered.
type of[Answer any] struct {
	node   string
	answer Answer
}

// ask asks nodes the request's path, and returns the answers of those that answer, sorted
// by node. The others are not asked until the next Set.
func ask[Answer any](f *API, r *http.Request, query url.Values, nodes []*node) ([]of[Answer], error) {
	ctx, cancel := context.WithTimeout(r.Context(), f.timeout)
	defer cancel()
	answers := make([]*of[Answer], len(nodes))
	var refused *refusal
	var mu sync.Mutex // guards refused
	var asked sync.WaitGroup
	for i, n := range nodes {
		asked.Go(func() {
			a := &of[Answer]{node: n.Name}
			body, err := n.get(ctx, r.URL.Path, query)
			if err == nil {
				err = json.Unmarshal(body, &a.answer)
			}
			said := (*refusal)(nil)
			switch {
			case err == nil:
				answers[i] = a
			case errors.As(err, &said):
				mu.Lock()
				defer mu.Unlock()
				refused = said
			case errors.Is(err, context.DeadlineExceeded):
				f.note(n, fmt.Errorf("no answer in %s", f.timeout))
			case ctx.Err() == nil: // else the browser has gone
				f.note(n, err)
			}
		})
	}
	asked.Wait()
	var out []of[Answer]
	for _, a := range answers {
		if a != nil {
			out = append(out, *a)
		}
	}
	if len(out) == 0 && refused != nil {
		return nil, refused
	}
	if len(out) == 0 {
		return nil, errNobody
	}
	return out, nil
}

func send(w http.ResponseWriter, answer any) {
	body, err := json.Marshal(answer)
	if err != nil {
		refuse(w, http.StatusInternalServerError, err.Error())
		return
	}
	head(w, "application/json", http.StatusOK)
	_, _ = w.Write(append(printable.JSON(body), '\n')) // the browser may have gone
}

func fail(w http.ResponseWriter, err error) {
	if said := (*refusal)(nil); errors.As(err, &said) {
		head(w, "application/json", said.status)
		_, _ = w.Write(said.body) // the browser may have gone
		return
	}
	refuse(w, http.StatusBadGateway, err.Error())
}

func refuse(w http.ResponseWriter, status int, text string) {
	body, err := json.Marshal(api.Error{Error: text})
	if err != nil {
		body = nil
	}
	head(w, "application/json", status)
	_, _ = w.Write(append(printable.JSON(body), '\n')) // the browser may have gone
}

func head(w http.ResponseWriter, kind string, status int) {
	w.Header().Set("Content-Type", kind)
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
}
