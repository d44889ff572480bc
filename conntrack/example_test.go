package conntrack_test

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/sluice-proxy/sluice/conntrack"
	"github.com/sluice-proxy/sluice/service"
)

// The record of a connection whose first endpoint refused, as a line for people.
// Times are nanoseconds of the event loop's clock.
func Example() {
	log, err := conntrack.OpenLog(conntrack.LogOptions{Writer: os.Stdout, Console: true, Zone: time.UTC})
	if err != nil {
		fmt.Println(err)
		return
	}
	began := time.Date(2026, time.June, 1, 12, 0, 0, 0, time.UTC)
	table := conntrack.NewTable(conntrack.Options{Shards: 1, Sink: log, Now: func() time.Time { return began }})
	shard := table.Shard(0) // belongs to one event loop

	port := &service.Port{Name: service.PortName{Name: service.Name{Namespace: "default", Name: "web"}, Port: "http", Protocol: service.TCP}}
	one := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.4:8080"), Pod: service.Name{Namespace: "default", Name: "web-1"}}
	two := &service.Endpoint{Addr: netip.MustParseAddrPort("10.1.0.5:8080"), Pod: service.Name{Namespace: "default", Name: "web-2"}, Place: service.At("b", "")}

	// Accepted.
	r := conntrack.Record{
		Client:   netip.MustParseAddrPort("10.9.0.1:41822"),
		VIP:      netip.MustParseAddrPort("10.96.0.10:80"),
		Port:     port,
		Protocol: service.TCP,
		Counters: table.Counters(port.Name),
	}
	shard.Open(&r)
	// Dialled.
	r.BeginAttempt(one, 0)
	r.AttemptFailed(conntrack.DialRefused, int64(200*time.Microsecond))
	r.BeginAttempt(two, int64(200*time.Microsecond))
	r.AttemptSucceeded(int64(1100 * time.Microsecond))
	// Relayed, and over.
	r.BytesFromClient, r.BytesFromEndpoint = 78, 1200
	r.FirstByte, r.Duration = int64(3200*time.Microsecond), int64(12*time.Millisecond)
	r.End = conntrack.ClientFin
	shard.Close(&r)

	shard.Flush()
	if err := table.Close(context.Background()); err != nil {
		fmt.Println(err)
	}
	if err := log.Close(); err != nil {
		fmt.Println(err)
	}
	// Output:
	// 06-01 12:00:00.000 10.9.0.1:41822 -> 10.96.0.10:80 default/web:http -> 10.1.0.5:8080 web-2 on b | 2 attempts: 10.1.0.4:8080 web-1 refused 200us | connect 1.1ms, first byte 3.2ms, total 12ms | 78 B up, 1.17 KiB down | client_fin
}
