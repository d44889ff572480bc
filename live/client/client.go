// Package client asks a running proxy through its admin socket.
package client

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/internal/sys"
	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/filter"
)

// Client asks one proxy. It is safe for concurrent use.
type Client struct {
	// Name is the path or abstract name of the socket; empty if Reach made the Client.
	Name string
	// Version is what the proxy said of itself when it was found.
	Version api.Version
	where   string // for errors
	http    *http.Client
}

// dialTime bounds how long connecting to a socket takes.
const dialTime = 5 * time.Second

// New returns a Client of a socket, whether anything listens there or not.
func New(name string) *Client {
	return &Client{Name: name, where: "admin socket " + name, http: &http.Client{Transport: Transport(name)}}
}

// Reach returns a Client that connects to a proxy by dial, once the proxy has said who it
// is. Where names the proxy in errors. Close ends its connections.
func Reach(ctx context.Context, where string, dial func() (net.Conn, error)) (*Client, error) {
	c := &Client{where: where, http: &http.Client{Transport: TransportBy(dial)}}
	return c, c.Get(ctx, api.PathVersion, nil, &c.Version)
}

// TransportBy returns a transport to a proxy that dial connects to.
func TransportBy(dial func() (net.Conn, error)) *http.Transport {
	return &http.Transport{
		DialContext:  func(context.Context, string, string) (net.Conn, error) { return dial() },
		MaxIdleConns: 4, IdleConnTimeout: time.Minute,
	}
}

// Transport returns the transport to the proxy.
func (c *Client) Transport() http.RoundTripper { return c.http.Transport }

// Close ends the connections that no request uses.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Transport returns a transport to a socket. It connects only to a proxy that runs as
// root or as our user: an abstract name may be anybody's.
func Transport(name string) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			ctx, cancel := context.WithTimeout(ctx, dialTime)
			defer cancel()
			c, err := new(net.Dialer).DialContext(ctx, "unix", name)
			if err != nil {
				return nil, err
			}
			if err := trusted(name, c); err != nil {
				_ = c.Close() // the error to tell is another
				return nil, err
			}
			return c, nil
		},
		MaxIdleConns: 4, IdleConnTimeout: 10 * time.Second,
	}
}

// trusted returns why the process at the other end of a connection to a socket is not
// believed, or nil.
func trusted(name string, c net.Conn) error {
	conn, ok := c.(*net.UnixConn)
	if !ok {
		return errors.New("not a unix socket")
	}
	peer, err := sys.PeerCredentials(conn)
	if err != nil {
		return err
	}
	return believed(name, int(peer.Uid), os.Geteuid())
}

// believed returns why our user does not believe a peer, or cannot ask it: an abstract
// socket has no mode, and its server closes connections of others without a word.
func believed(name string, peer, own int) error {
	switch {
	case peer == own:
		return nil
	case peer != 0:
		return fmt.Errorf("uid %d listens there, which is neither root nor our user", peer)
	case strings.HasPrefix(name, "@"):
		return fs.ErrPermission
	}
	return nil
}

// request sends a request. The answer has status 200.
func (c *Client) request(ctx context.Context, method, path string, query url.Values, body any) (*http.Response, error) {
	target := url.URL{Scheme: "http", Host: "sluice", Path: path, RawQuery: query.Encode()}
	var sent io.Reader = http.NoBody
	if body != nil {
		text, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		sent = bytes.NewReader(text)
	}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), sent)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		var wrapped *url.Error
		if errors.As(err, &wrapped) {
			err = wrapped.Err // without the URL, which says nothing
		}
		return nil, fmt.Errorf("%s: %w", c.where, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	var failed api.Error
	if err := json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(&failed); err != nil || failed.Error == "" {
		return nil, fmt.Errorf("%s: %s", c.where, resp.Status)
	}
	if failed.Filter != "" {
		// The proxy may be of another version: its fields are what counts.
		if _, err := filter.Parse(failed.Filter); err != nil {
			return nil, err
		}
	}
	return nil, errors.New(failed.Error)
}

// Get asks for one object.
func (c *Client) Get(ctx context.Context, path string, query url.Values, answer any) error {
	return c.exchange(ctx, http.MethodGet, path, query, nil, answer)
}

// Act sends an action.
func (c *Client) Act(ctx context.Context, path string, body, answer any) error {
	return c.exchange(ctx, http.MethodPost, path, nil, body, answer)
}

func (c *Client) exchange(ctx context.Context, method, path string, query url.Values, body, answer any) error {
	resp, err := c.request(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(resp.Body, maxAnswer)).Decode(answer); err != nil {
		return fmt.Errorf("%s: the answer: %w", c.where, err)
	}
	return nil
}

// ErrEnded is why an answer stops in the middle.
var ErrEnded = errors.New("the proxy has ended, or made room for other clients")

// maxAnswer bounds an answer that is one object: a page of 10,000 rows.
const maxAnswer = 64 << 20

// maxLine bounds a line of a stream: a frame of 10,000 rows is one.
const maxLine = 16 << 20

// Stream calls visit with each line of a stream, until the stream or ctx ends or
// visit returns an error. The line is valid only during the call. The end of ctx is
// no error.
func (c *Client) Stream(ctx context.Context, path string, query url.Values, visit func(line []byte) error) error {
	resp, err := c.request(ctx, http.MethodGet, path, query, nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 64<<10), maxLine)
	for lines.Scan() {
		if line := lines.Bytes(); bytes.HasPrefix(line, []byte(`{"error":`)) {
			var failed api.Error
			if json.Unmarshal(line, &failed) == nil {
				return errors.New(failed.Error)
			}
		}
		if err := visit(lines.Bytes()); err != nil {
			return err
		}
	}
	if err := lines.Err(); err != nil && ctx.Err() == nil {
		if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) {
			return ErrEnded
		}
		return fmt.Errorf("%s: %w", c.where, err)
	}
	return nil
}
