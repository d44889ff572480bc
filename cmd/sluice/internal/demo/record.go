package demo

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"strings"
	"time"

	"github.com/sluice-proxy/sluice/balancer"
	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// record is one line of the proxy's access log, in the JSON form that
// docs/connection-log.md describes.
type record struct {
	Time              time.Time       `json:"time"`
	Protocol          string          `json:"protocol"`
	Client            netip.AddrPort  `json:"client"`
	VIP               netip.AddrPort  `json:"vip"`
	Service           string          `json:"service"`
	Endpoint          netip.AddrPort  `json:"endpoint"`
	Pod               string          `json:"pod"`
	Node              string          `json:"node"`
	SourceAddress     netip.AddrPort  `json:"source_address"`
	Affinity          string          `json:"affinity"`
	Attempts          uint16          `json:"attempts"`
	FailedAttempts    []failedAttempt `json:"failed_attempts"`
	ConnectUS         *int64          `json:"connect_us"`
	FirstByteUS       int64           `json:"first_byte_us"`
	DurationUS        int64           `json:"duration_us"`
	BytesFromClient   uint64          `json:"bytes_from_client"`
	BytesFromEndpoint uint64          `json:"bytes_from_endpoint"`
	End               string          `json:"end"`
}

type failedAttempt struct {
	Endpoint netip.AddrPort `json:"endpoint"`
	Pod      string         `json:"pod"`
	Error    string         `json:"error"`
	US       int64          `json:"us"`
}

// parseRecord reads a line of the access log.
func parseRecord(line []byte) (*record, error) {
	r := &record{}
	if err := json.Unmarshal(line, r); err != nil {
		return nil, fmt.Errorf("access log line %q: %w", line, err)
	}
	if !r.Client.IsValid() || !r.VIP.IsValid() || r.End == "" {
		return nil, fmt.Errorf("access log line %q: lacks client, vip or end", line)
	}
	return r, nil
}

// key tells connections apart: no two of the demo share all of it.
func (r *record) key() key { return key{r.Client, r.VIP} }

type key struct{ client, vip netip.AddrPort }

// retried tells that an endpoint did not answer.
func (r *record) retried() bool { return len(r.FailedAttempts) > 0 }

// console returns the record as `--access-log-format console` writes it, by the
// same code.
func (r *record) console() (string, error) {
	var text bytes.Buffer
	log, err := conntrack.OpenLog(conntrack.LogOptions{Writer: &text, Format: conntrack.Console})
	if err != nil {
		return "", err
	}
	log.Write([]conntrack.Record{r.original()})
	if err := log.Close(); err != nil {
		return "", err
	}
	return strings.TrimSuffix(text.String(), "\n"), nil
}

// original is the record that the line was made from, in what the console form
// shows of it.
func (r *record) original() conntrack.Record {
	o := conntrack.Record{
		Wall:              r.Time.UnixNano(),
		Client:            r.Client,
		VIP:               r.VIP,
		SourceAddr:        r.SourceAddress,
		Attempts:          r.Attempts,
		FirstByte:         r.FirstByteUS * int64(time.Microsecond),
		Duration:          r.DurationUS * int64(time.Microsecond),
		BytesFromClient:   r.BytesFromClient,
		BytesFromEndpoint: r.BytesFromEndpoint,
		Affinity:          named(r.Affinity, balancer.AffinityNone, balancer.AffinityNew, balancer.AffinityHit, balancer.AffinityMoved),
		End:               named(r.End, conntrack.Ends()...),
	}
	if r.Service != "" {
		full, port, _ := strings.Cut(r.Service, ":")
		o.Port = &service.Port{Name: service.PortName{Name: objectName(full), Port: port}}
	}
	if r.Endpoint.IsValid() {
		o.Endpoint = &service.Endpoint{Addr: r.Endpoint, Pod: objectName(r.Pod), Node: r.Node}
	}
	if r.ConnectUS != nil {
		o.Connected, o.ConnectTime = true, *r.ConnectUS*int64(time.Microsecond)
	}
	for _, f := range r.FailedAttempts {
		a := conntrack.Attempt{Duration: f.US * int64(time.Microsecond), Error: named(f.Error, conntrack.DialErrors()...)}
		if f.Endpoint.IsValid() {
			a.Endpoint = &service.Endpoint{Addr: f.Endpoint, Pod: objectName(f.Pod)}
		}
		o.Failed = append(o.Failed, a)
	}
	return o
}

// objectName splits "namespace/name".
func objectName(s string) service.Name {
	namespace, name, ok := strings.Cut(s, "/")
	if !ok {
		return service.Name{}
	}
	return service.Name{Namespace: namespace, Name: name}
}

// named returns the value that has the name, or the zero value.
func named[T fmt.Stringer](name string, values ...T) T {
	for _, v := range values {
		if v.String() == name {
			return v
		}
	}
	var none T
	return none
}
