package demo

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"

	console "github.com/sluice-proxy/sluice/cmd/sluice/internal/show"
	"github.com/sluice-proxy/sluice/live/api"
)

// record is one line of the proxy's access log, in the JSON form that
// docs/connection-log.md describes.
type record struct {
	api.Connection
	key key
}

// key tells connections apart: no two of the demo share all of it.
type key struct{ client, vip netip.AddrPort }

// parseRecord reads a line of the access log.
func parseRecord(line []byte) (*record, error) {
	r := &record{}
	err := json.Unmarshal(line, &r.Connection)
	if err == nil {
		r.key.client, err = netip.ParseAddrPort(r.Client)
	}
	if err == nil {
		r.key.vip, err = netip.ParseAddrPort(r.VIP)
	}
	if err == nil && r.End == "" {
		err = errors.New("it has no end")
	}
	if err != nil {
		return nil, fmt.Errorf("access log line %q: %w", line, err)
	}
	return r, nil
}

// console returns the record as `--access-log-format console` writes it.
func (r *record) console() string { return console.Line(&r.Connection) }

// retried tells that an endpoint did not answer.
func (r *record) retried() bool { return len(r.Failed) > 0 }
