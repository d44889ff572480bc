package amount

import (
	"testing"
	"time"

	"github.com/sluice-proxy/sluice/test/check"
)

func TestDuration(t *testing.T) {
	for _, tt := range []struct {
		d    time.Duration
		want string
	}{
		{-1, "0us"}, {0, "0us"}, {999, "0us"}, {85 * time.Microsecond, "85us"}, {999999, "999us"},
		{time.Millisecond, "1ms"}, {1240 * time.Microsecond, "1.24ms"}, {1200 * time.Microsecond, "1.2ms"}, {1009999, "1ms"},
		{12345 * time.Microsecond, "12.3ms"}, {310*time.Millisecond + 999999, "310ms"}, {999999999, "999ms"},
		{time.Second, "1s"}, {12300 * time.Millisecond, "12.3s"}, {59999 * time.Millisecond, "59.9s"},
		{time.Minute, "1m0s"}, {250 * time.Second, "4m10s"}, {time.Hour - 1, "59m59s"},
		{time.Hour, "1h0m"}, {185 * time.Minute, "3h5m"}, {1000 * time.Hour, "1000h0m"},
	} {
		check.Equalf(t, Duration(tt.d), tt.want, "%d ns", tt.d)
	}
}

func TestBytes(t *testing.T) {
	for _, tt := range []struct {
		n    uint64
		want string
	}{
		{0, "0 B"}, {1023, "1023 B"}, {1024, "1 KiB"}, {1290, "1.25 KiB"}, {10 << 10, "10 KiB"}, {1<<20 - 1, "1023 KiB"},
		{1 << 20, "1 MiB"}, {3 << 29, "1.5 GiB"}, {1 << 40, "1 TiB"}, {1 << 50, "1 PiB"}, {1 << 60, "1 EiB"}, {1<<64 - 1, "15.9 EiB"},
	} {
		check.Equalf(t, Bytes(tt.n), tt.want, "%d", tt.n)
	}
}
