package client

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
	"github.com/sluice-proxy/sluice/live/socket"
)

// Find returns a Client of a proxy: that of a socket if it is named, else (empty, or
// socket.Auto) the one of this network namespace. Proxies of others are never taken by themselves: they may
// be tests, or demos. The error says what to do.
func Find(ctx context.Context, name string) (*Client, error) {
	if name != "" && name != socket.Auto {
		c := New(name)
		if err := c.greet(ctx); err != nil {
			return nil, advise(name, err)
		}
		return c, nil
	}
	usual := []string{socket.File(""), socket.Abstract("")}
	others, err := filepath.Glob(filepath.Join(socket.Directory, "*.sock"))
	if err != nil {
		return nil, err
	}
	return findHere(ctx, usual, others, socket.Namespace())
}

// findHere finds the proxy of a network namespace: one of the usual sockets, else the
// only one of the others.
func findHere(ctx context.Context, usual, others []string, namespace uint64) (*Client, error) {
	var here, elsewhere []*Client
	var denied error
	others = slices.DeleteFunc(others, func(n string) bool { return slices.Contains(usual, n) })
	for i, n := range slices.Concat(usual, others) {
		c := New(n)
		switch err := c.greet(ctx); {
		case err == nil && c.Version.Namespace != namespace:
			elsewhere = append(elsewhere, c)
		case err == nil && i < len(usual):
			return c, nil
		case err == nil:
			here = append(here, c)
		case errors.Is(err, fs.ErrPermission) && (denied == nil || i == 0):
			denied = advise(n, err)
		}
	}
	switch {
	case len(here) == 1:
		return here[0], nil
	case len(here) > 1:
		return nil, errors.New("several proxies run in this network namespace; name one with --admin-socket:" + list(here))
	case denied != nil:
		return nil, denied
	case len(elsewhere) > 0:
		return nil, errors.New("no proxy runs in this network namespace; there are others to name with --admin-socket:" + list(elsewhere))
	}
	return nil, fmt.Errorf("no proxy runs in this network namespace that can be asked: neither %s nor %s answers\n"+
		"  start one:                sluice run, or sluice demo\n"+
		"  it has another socket:    --admin-socket PATH\n"+
		"  it runs in a pod:         kubectl exec -n kube-system POD -- sluice COMMAND", usual[0], usual[1])
}

// list names proxies, one on each line.
func list(all []*Client) string {
	var b strings.Builder
	for _, c := range all {
		fmt.Fprintf(&b, "\n  %s (node %s, process %d)", c.Name, c.Version.Node, c.Version.PID)
	}
	return b.String()
}

// greetTime bounds how long a proxy may take to say who it is.
const greetTime = 5 * time.Second

// greet asks who answers.
func (c *Client) greet(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, greetTime)
	defer cancel()
	return c.Get(ctx, api.PathVersion, nil, &c.Version)
}

// advise says what to do about an error of a socket.
func advise(name string, err error) error {
	switch {
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("no right to use %s: it is for its owner%s and root; use sudo", name, ownerOf(name))
	case errors.Is(err, fs.ErrNotExist):
		return fmt.Errorf("%s does not exist: does the proxy run, and with --admin-socket %s?", name, name)
	case errors.Is(err, syscall.ECONNREFUSED):
		return fmt.Errorf("nobody answers at %s: the proxy that made it has ended", name)
	}
	return err
}

// ownerOf names the owner of a file, if it is known.
func ownerOf(name string) string {
	info, err := os.Stat(name)
	if err != nil {
		return ""
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		return fmt.Sprintf(" (uid %d)", s.Uid)
	}
	return ""
}
