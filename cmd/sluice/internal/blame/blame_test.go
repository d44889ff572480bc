package blame

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/live/api"
)

func TestSum(t *testing.T) {
	at := time.Date(2026, 11, 28, 12, 0, 0, 0, time.UTC)
	failure := func(age int, pod, reason, client string) api.Failure {
		return api.Failure{Time: at.Add(-time.Duration(age) * time.Second), ID: uint64(100 - age), Client: client, Service: "shop/cart:http", Endpoint: pod + ":80", Pod: pod, Error: reason}
	}
	var got []string
	for _, s := range Sum([]api.Failure{ // newest first
		failure(1, "a", "refused", "10.1.0.1:1"),
		failure(2, "b", "timeout", "10.1.0.1:2"),
		failure(3, "b", "refused", "[fd00::1]:3"),
		failure(4, "b", "timeout", "10.1.0.1:4"),
		failure(5, "b", "timeout", "10.1.0.2:4"),
		failure(9, "", "other", "10.1.0.2:5"),
		{Time: at.Add(-10 * time.Second), VIP: "10.96.0.9:80", Error: "unknown_address", Client: "10.1.0.2", Packets: 3},
		{Time: at.Add(-11 * time.Second), VIP: "10.96.0.9:80", Error: "unknown_address", Client: "10.1.0.2", Packets: 4},
	}) {
		got = append(got, fmt.Sprintf("%d %s%s %s from %.0f to %.0f, %d clients, last %s of %d, %d packets", s.Count, s.Pod, s.VIP, s.Error, at.Sub(s.First).Seconds(), at.Sub(s.Last).Seconds(), s.Clients, s.LastClient, s.LastID, s.Packets))
	}
	want := []string{
		"3 b timeout from 5 to 2, 2 clients, last 10.1.0.1:2 of 98, 0 packets",
		"2 10.96.0.9:80 unknown_address from 11 to 10, 1 clients, last 10.1.0.2 of 0, 7 packets",
		"1 a refused from 1 to 1, 1 clients, last 10.1.0.1:1 of 99, 0 packets",
		"1 b refused from 3 to 3, 1 clients, last [fd00::1]:3 of 97, 0 packets",
		"1  other from 9 to 9, 1 clients, last 10.1.0.2:5 of 91, 0 packets",
	}
	if !slices.Equal(got, want) {
		t.Errorf("%q\nwant %q", got, want)
	}
}
